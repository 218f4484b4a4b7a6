"""Untrusted params.yaml: it gives plain values, quickly, or ends in one line."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_core.errors import UserError
from tasks.params.loader import MOST_VALUES, read_yaml

if TYPE_CHECKING:
    from tests.conftest import Ended, Project

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
"""A billion laughs: 10^12 values in twelve lines."""


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], object]:
    def call(text: str) -> object:
        (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
        return read_yaml(tmp_path / "params.yaml")

    return call


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.mkdir [{mark}]",
        "!!python/object/new:os.mkdir [{mark}]",
        "!!python/name:os.mkdir",
        "!!python/module:os",
        "!own {{a: 1}}",
    ],
)
def test_a_tag_makes_no_object(read: Callable[[str], object], tmp_path: Path, value: str) -> None:
    mark = tmp_path / "owned"
    with pytest.raises(UserError, match="no valid YAML") as refused:
        read("seed: " + value.format(mark=mark) + "\n")
    assert "\n" not in str(refused.value)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LAUGHS, f"more than {MOST_VALUES} values"),
        ("a: &a {b: [*a]}\n", "an alias .* is inside what it names"),
        ("a: " + "[" * 2000 + "]" * 2000, "nested too deeply"),
        ("seed: " + "9" * 100_000, "a value cannot be read"),
        ("a: " + "x" * 2**21, "that is no parameter file"),
    ],
    ids=["a billion laughs", "an alias within itself", "deep", "a long number", "a big file"],
)
def test_a_bomb_ends_in_one_line_quickly(read: Callable[[str], object], text: str, says: str) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match=says) as refused:
        read(text)
    assert time.monotonic() - started < 10
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_an_honest_alias_is_read(read: Callable[[str], object]) -> None:
    found: Any = read("a: &a {b: 1}\nc: *a\n")
    assert (found["a"], found["c"]) == ({"b": 1}, {"b": 1})


def test_both_drivers_and_the_stage_stop_at_a_tag(project: "Project", stage_main: Callable[..., "Ended"]) -> None:
    mark = project.root / "owned"
    params = project.root / "params.yaml"
    params.write_text(params.read_text(encoding="utf-8") + f"x: !!python/object/apply:os.mkdir [{mark}]\n", "utf-8")
    ended = stage_main(project, "check")
    assert ended.code == 2
    assert ended.stderr.startswith("check: params.yaml: no valid YAML (could not determine a constructor")
    assert ended.stderr.count("\n") == 1
    done = project.run(sys.executable, "-m", "dvc", "repro", "check")
    assert done.returncode != 0
    assert not mark.exists()


@pytest.mark.parametrize("command", ["tasks check", "flows.cli run"])
def test_a_bomb_stops_stages_and_commands(project: "Project", command: str) -> None:
    """A plain `dvc repro` is DVC's own: it writes out every alias before any code of ours runs."""
    params = project.root / "params.yaml"
    params.write_text(params.read_text(encoding="utf-8") + LAUGHS, encoding="utf-8")
    done = project.run("timeout", "60", sys.executable, "-m", *command.split())
    assert done.returncode == 2
    assert f"params.yaml: more than {MOST_VALUES} values" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
