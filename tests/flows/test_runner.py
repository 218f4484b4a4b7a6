"""The first line of a run, and its end when the Prefect server is lost. Whole runs are in test_cli.py and
tests/faults/test_prefect.py."""

import os
from pathlib import Path

import pytest

from flows import runner, server, terminal
from flows.graph import Graph
from flows.stages import FAILED, Outcome, PipelineFailed, StageCrash, StageUserError
from tasks.params.methods import BY_NAME


class Left(Exception):
    """Instead of the end of the process."""


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(server, "stop_temporary", lambda signals: None)
    monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@127.0.0.1:1/api")


def test_the_first_line_names_what_may_run() -> None:
    graph = Graph(("a", "b", "c"), {}, {})
    below = "; and up to 1 below them, where their inputs change"
    assert runner.first_line(graph, {"b": ["input.txt changed"], "c": []}) == f"1 of 3 stages to run: b{below}"
    assert runner.first_line(graph, {"b": ["--force"]}) == "1 of 3 stages to run: b"
    assert runner.first_line(graph, {}) == "3 stages, all up to date"
    switched_off = runner.first_line(graph, {"a": ["new"], "b": ["new"]}, off={"b"})
    assert switched_off == "1 of 2 stages to run: a (switched off: b)"
    assert runner.first_line(graph, {"b": ["new"]}, off={"b"}) == "0 of 2 stages to run (switched off: b)"
    above = runner.first_line(graph, {"b": ["new"], "c": []}, off={"b"})
    assert above.startswith("0 of 2 stages to run; and up to 1 below a changed one")


def test_methods_that_are_switched_off(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("dpo: {enabled: true}\nrloo: {enabled: false}\n")
    assert runner.switched_off(tmp_path / "params.yaml") == set(BY_NAME) - {"dpo"}
    assert runner.switched_off(tmp_path / "missing.yaml") == set()
    (tmp_path / "params.yaml").write_text("scorer: [{term: mine.py, weight: 1}]\n")
    assert runner.switched_off(tmp_path / "params.yaml") == {"preferences", "reward", *BY_NAME}


@pytest.mark.parametrize(
    ("cause", "code", "says"),
    [
        (None, 1, "the Prefect server (http://127.0.0.1:1/api) died or hangs"),
        (PipelineFailed([StageCrash("ppo: boom")], []), 1, "ppo: boom"),
        (PipelineFailed([StageUserError("ppo: no")], []), 2, "ppo: no"),
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
