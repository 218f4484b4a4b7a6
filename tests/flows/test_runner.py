"""The end of a run whose Prefect server is gone. Whole runs are in test_cli.py and tests/faults/test_prefect.py."""

import os

import pytest

from flows import runner, server
from flows.stages import FAILED, Outcome, PipelineFailed, StageCrash


class Left(Exception):
    """Instead of the end of the process."""


@pytest.fixture(autouse=True)
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(server, "take_back", lambda seconds: None)
    monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@127.0.0.1:1/api")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (None, 1, "the Prefect server (http://127.0.0.1:1/api) died or hangs"),
        (PipelineFailed([StageCrash("ppo: boom")], [Outcome("ppo", FAILED, 1.0)]), 1, "ppo: boom"),
        (KeyboardInterrupt(), 130, "stopped; nothing is left running"),
        (SystemExit(143), 143, "stopped; nothing is left running"),
    ],
)
def test_a_lost_server_ends_the_run_with_its_code_and_no_password(
    capsys: pytest.CaptureFixture[str], error: BaseException | None, code: int, says: str
) -> None:
    with pytest.raises(Left) as left:
        runner._leave_without_server(error, [Outcome("ppo", FAILED, 1.0)])
    assert left.value.args == (code,)
    printed = capsys.readouterr()
    assert says in printed.err
    assert "FAILED" in printed.out
    assert "secret" not in printed.out + printed.err
