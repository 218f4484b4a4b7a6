"""The first line of a run, and its end when the Prefect server is lost. Whole runs are in test_cli.py and
tests/faults/test_prefect.py."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import runner, server, terminal
from flows.graph import MAY_RUN, RESTORES, RUNS, UNCHANGED
from flows.stages import FAILED, Outcome, PipelineFailed, StageCrash, StageUserError


class Left(Exception):
    """Instead of the end of the process."""


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(server, "stop_temporary", lambda signals: None)
    monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@127.0.0.1:1/api")


def test_the_first_line_and_the_dry_run_say_what_is_known() -> None:
    expected = {
        "a": (UNCHANGED, []),
        "b": (RESTORES, ["b.out missing"]),
        "c": (RUNS, ["input.txt changed"]),
        "d": (MAY_RUN, []),
        "off": (RUNS, ["new"]),
    }
    assert runner.first_line(expected, {"off"}) == (
        "4 stages, 1 up to date; to restore from DVC's cache: b; to run: c; to run if their inputs change: d"
    )
    lines = runner.dry_run_table(expected, {"off"}).splitlines()
    assert lines[2].split() == ["b", "to", "restore", "from", "DVC's", "cache", "b.out", "missing"]
    assert lines[3].split() == ["c", "to", "run", "input.txt", "changed"]
    assert lines[-1] == "switched off in params.yaml: off"
    assert runner.first_line({"a": (UNCHANGED, [])}, ()) == "1 stages, all up to date"


def test_a_dry_run_runs_nothing(
    toy: Callable[..., Path], serial: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """What DVC's cache has is said to be restored only where no input changed."""
    root = toy({"one": ("work", []), "two": ("work", ["one"]), "three": ("work", ["two"]), "other": ("work", [])})
    serial(root)
    before = (root / "log.txt").read_text()
    (root / "one.out").unlink()
    (root / "two.out").write_text("edited")
    (root / "other.out").unlink()
    assert runner.run(root, None, False, dry_run=True) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    what = {row[0].strip(): next(cell.strip() for cell in row[1:] if cell) for row in rows if len(row) > 1}
    assert what == {
        "stage": "what", "one": RESTORES, "two": RUNS, "three": MAY_RUN, "other": RESTORES,
    }  # fmt: skip
    assert (root / "log.txt").read_text() == before
    assert not (root / "one.out").exists()


def test_a_dry_run_names_what_params_switch_off(toy: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    root = toy({"sft": ("work", []), "dpo": ("work", ["sft"]), "rloo": ("work", ["sft"])})
    (root / "params.yaml").write_text("sft: {enabled: false}\ndpo: {enabled: true}\nrloo: {enabled: false}\n")
    assert runner.run(root, None, False, dry_run=True) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "switched off in params.yaml: rloo"


@pytest.mark.parametrize(
    ("cause", "code", "says"),
    [
        (None, 1, "the Prefect server (http://127.0.0.1:1/api) died or hangs"),
        (PipelineFailed([Outcome("ppo", FAILED, 1.0, error=StageCrash("ppo: boom"))]), 1, "ppo: boom"),
        (PipelineFailed([Outcome("ppo", FAILED, 1.0, error=StageUserError("ppo: no"))]), 2, "ppo: no"),
        (KeyboardInterrupt(), 130, "stopped; nothing is left running"),
        (SystemExit(143), 143, "stopped; nothing is left running"),
    ],
)
def test_a_lost_server_ends_the_run_with_its_code_and_no_password(
    lost: None, capsys: pytest.CaptureFixture[str], cause: BaseException | None, code: int, says: str
) -> None:
    error: BaseException = OSError("connection refused")
    error.__context__ = cause
    with terminal.screen(["ppo"]):
        terminal.end(Outcome("ppo", FAILED, 1.0))
        with pytest.raises(Left) as left:
            runner._exit_without_server(error)
    assert left.value.args == (code,)
    printed = capsys.readouterr()
    assert says in printed.err
    assert "FAILED" in printed.out
    assert "secret" not in printed.out + printed.err
