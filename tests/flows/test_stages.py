"""One stage through DVC: how it ended, and whether a failure is a user's error."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import stages
from flows.stages import EXECUTED, RESTORED, UP_TO_DATE, StageCrash, StageUserError, refresh_sources, run_stage


def state(root: Path, stage: str, force: bool = False) -> str:
    return run_stage(root, stage, force, None, lambda line: None).state


@pytest.mark.slow
def test_ran_up_to_date_restored_forced(toy: Callable[..., Path]) -> None:
    root = toy({"one": ("work", [])})
    assert state(root, "one") == EXECUTED
    assert state(root, "one") == UP_TO_DATE
    (root / "one.out").unlink()
    assert state(root, "one") == RESTORED
    assert (root / "one.out").read_text() == "one1\n"
    assert state(root, "one", force=True) == EXECUTED
    log = [line.split() for line in (root / "log.txt").read_text().splitlines()]
    assert len([event for event in log if event[1] == "begin"]) == 2
    assert {Path(event[4]).parent for event in log} == {Path(sys.executable).parent}


def test_exit_2_is_a_users_error_with_the_message_of_the_stage(toy: Callable[..., Path]) -> None:
    root = toy({"one": ("refuse 'clip_ratio: must be > 0'", [])})
    with pytest.raises(StageUserError, match=r"^one: clip_ratio: must be > 0$"):
        state(root, "one")


def test_a_missing_input_is_a_users_error(toy: Callable[..., Path]) -> None:
    root = toy({"one": ("work", [])})
    (root / "input.txt").unlink()
    with pytest.raises(StageUserError, match=r"^one: .*input.txt") as caught:
        state(root, "one")
    assert str(root) not in str(caught.value)


def test_a_crash_is_no_users_error(toy: Callable[..., Path]) -> None:
    root = toy({"one": ("crash 1", []), "two": ("sleep 60", [])})
    with pytest.raises(StageCrash, match=r"^one: .*exited with 1 \(RuntimeError: boom\)$"):
        state(root, "one")
    with pytest.raises(StageCrash, match=r"^two: stopped after 3 seconds$"):
        run_stage(root, "two", False, 3.0, lambda line: None)


def test_edited_data_is_taken_in_and_missing_data_is_named(toy: Callable[..., Path]) -> None:
    root = toy({"one": ("work", [])})
    tracked = root / "input.txt.dvc"
    tracked.write_text("outs:\n- md5: d41d8cd98f00b204e9800998ecf8427e\n  size: 0\n  hash: md5\n  path: input.txt\n")
    refresh_sources(root, ("input.txt.dvc",), lambda line: None)
    assert "b026324c6904b2a9cb4b88d6d61c81d1" in tracked.read_text()
    (root / "input.txt").unlink()
    with pytest.raises(StageUserError, match=r"missing data 'source': input.txt; .*dvc checkout"):
        refresh_sources(root, ("input.txt.dvc",), lambda line: None)


def test_a_report_may_contain_unicode_line_separators(tmp_path: Path) -> None:
    """`str.splitlines` would cut the JSON there."""
    report = {"stage": "ingest", "exit": 2, "message": "row 3: a\u2028b\u0085c"}
    (tmp_path / "outcome.json").write_text(json.dumps(report, ensure_ascii=False) + "\n", encoding="utf-8")
    assert stages.read_report(tmp_path / "outcome.json") == report
    assert stages.read_report(tmp_path / "missing.json") is None
