"""Why a stage is not up to date, by DVC's own status."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.graph import UNCHANGED, brief, opened
from tests.conftest import call, write_graph

Toy = Callable[..., Path]
STAGES = {"one": ("work", []), "two": ("work", ["one"]), "three": ("work", ["two"]), "other": ("work", [])}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, empty_project: Path) -> Path:
    """A project whose stages have run."""
    root = Path(shutil.copytree(empty_project, tmp_path_factory.mktemp("status") / "toy"))
    write_graph(root, STAGES)
    (root / "params.yaml").write_text("one: {kl: {coef: 0.05, target: null}, api_key: a}\n")
    (root / "tasks").mkdir()
    (root / "tasks" / "one.py").write_text("1\n")
    content = yaml.safe_load((root / "dvc.yaml").read_text())
    content["stages"]["one"] |= {"params": ["one"], "deps": ["input.txt", "tasks/one.py"]}
    (root / "dvc.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    call(root, sys.executable, "-m", "dvc", "repro")
    return root


@pytest.fixture
def finished(template: Path, tmp_path: Path) -> Path:
    """A copy of it to work on."""
    return Path(shutil.copytree(template, tmp_path / "toy", symlinks=True))


def why(root: Path) -> dict[str, list[str]]:
    with opened(root) as project:
        expected = project.forecast(project.graph)
        return {stage: reasons for stage, (what, reasons) in expected.items() if what != UNCHANGED}


def test_all_is_up_to_date(finished: Path) -> None:
    assert why(finished) == {}


def test_the_first_run(toy: Toy) -> None:
    assert why(toy(STAGES)) == {stage: ["not run here yet"] for stage in STAGES}


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda root: (root / name).write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (
            write("params.yaml", "one: {kl: {coef: 0.2}, api_key: b}\n"),
            ["one.kl.coef 0.05 → 0.2", "one.kl.target null → (unset)", "one.api_key (hidden) → (hidden)"],
        ),
        (write("tasks/one.py", "2\n"), ["code changed: tasks/one.py"]),
        (lambda root: (root / "tasks/one.py").unlink(), ["tasks/one.py missing"]),
        (write("one.out", "edited"), ["one.out edited"]),
        (lambda root: (root / "one.out").unlink(), ["one.out missing"]),
    ],
)
def test_each_reason_and_the_stages_below(finished: Path, change: Callable[[Path], Any], reasons: list[str]) -> None:
    change(finished)
    plan = why(finished)
    assert list(plan) == ["one", "two", "three"]
    assert plan["one"] == reasons
    assert plan["three"] == []


def test_a_changed_command_and_a_changed_input_of_several_stages(finished: Path) -> None:
    text = (finished / "dvc.yaml").read_text()
    (finished / "dvc.yaml").write_text(text.replace("worker.py other work", "worker.py other work -"))
    (finished / "input.txt").write_text("2\n")
    assert why(finished) == {
        "one": ["input.txt changed"],
        "two": ["input.txt changed"],
        "three": ["input.txt changed"],
        "other": ["the command changed", "input.txt changed"],
    }


def test_a_clone_has_not_run_although_its_lock_names_other_values(finished: Path) -> None:
    """dvc.lock is in git; outputs and cache are not."""
    for path in finished.glob("*.out"):
        path.unlink()
    shutil.rmtree(finished / ".dvc" / "cache")
    (finished / "params.yaml").write_text("one: {kl: {coef: 0.2}}\n")
    assert why(finished) == {stage: ["not run here yet"] for stage in STAGES}


def test_why_is_one_short_line() -> None:
    assert brief(["a.b 1 → 2"]) == "a.b 1 → 2"
    assert brief(["a.b 1 → 2", "x changed", "y changed", "z changed"]) == "a.b 1 → 2; x changed and 2 more"
    long = brief(["a" * 80, "b" * 80, "c"])
    assert (len(long), long[-12:]) == (100, "b… and 1 more"[-12:])


def test_edited_and_missing_data_files(finished: Path) -> None:
    (finished / "input.txt.dvc").write_text(
        "outs:\n- md5: b026324c6904b2a9cb4b88d6d61c81d1\n  size: 2\n  hash: md5\n  path: input.txt\n"
    )
    (finished / "input.txt").write_text("3\n")
    with opened(finished) as project:
        assert project.changed_sources(project.graph) == ("input.txt.dvc",)
