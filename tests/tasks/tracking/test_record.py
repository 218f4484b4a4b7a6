"""The record of a pipeline run: writing it never fails the stage, and damage is limited to a damaged line."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tasks.tracking import record, settings
from tests.tasks.tracking.conftest import pipeline, stage


def test_on_a_full_disk_a_row_is_lost_with_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = stage(tmp_path, pipeline(tmp_path), "ppo", points=1, end=None)
    rows = live.folder / record.LIVE
    kept = rows.rename(tmp_path / "kept")
    rows.symlink_to("/dev/full")
    for step in (2, 3):
        live.points({"ppo/kl": 1.0}, step)
    rows.unlink()
    kept.rename(rows)
    live.points({"ppo/kl": 1.0}, 4)
    live.end("FINISHED")
    points, _ = record.rows(live.folder)
    assert [step for _, step, _, _ in points] == [1, 4]
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_line_that_was_not_finished_is_left_out_and_the_next_process_goes_on(tmp_path: Path) -> None:
    folder = pipeline(tmp_path)
    live = stage(tmp_path, folder, "ppo", points=2, end=None)
    with (live.folder / record.LIVE).open("ab") as file:
        file.write(b'{"at": 1, "step": 3, "met')
    again = stage(tmp_path, folder, "ppo", points=3, end=None)  # from its checkpoint: 1 and 2 once more
    points, _ = record.rows(again.folder)
    assert [(step, value) for _, step, _, value in points] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert record.executions(folder)[0]["restarts"] == 1


def test_numbers_of_numpy_broken_text_and_tags(tmp_path: Path) -> None:
    live = stage(tmp_path, pipeline(tmp_path), "ppo", end=None)
    live.points({"ppo/kl@a": np.float32(0.5), "none": None}, np.int64(3))  # type: ignore[arg-type]
    live.tag("leash.alert.a", "\ud800")
    live.tag("leash.alert.a", "second")
    points, tags = record.rows(live.folder)
    assert [(name, step, value) for name, step, _, value in points] == [("ppo/kl_a", 3, 0.5)]
    assert tags == {"leash.alert.a": "second"}


@pytest.mark.parametrize(("used", "device"), [(False, "cpu"), (True, "NVIDIA A100")])
def test_the_device_is_recorded_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: bool, device: str
) -> None:
    cuda = SimpleNamespace(is_initialized=lambda: used, get_device_name=lambda: "NVIDIA A100")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    live = stage(tmp_path, pipeline(tmp_path), "ppo")
    assert record.read(live.folder / record.FACTS)["device"] == device


def test_the_files_of_a_stage_are_kept_and_large_ones_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "LINK_ABOVE_BYTES", 10)
    files = {"metrics/ppo.json": "{}", "plots/ppo.csv": "step,kl\n1,2\n", "report/index.html": "<p>"}
    live = stage(tmp_path, pipeline(tmp_path), "ppo", files=files)
    kept = live.folder / record.FILES
    assert sorted(path.name for path in kept.rglob("*") if path.is_file()) == ["ppo.csv", "ppo.json"]
    assert (kept / "plots/ppo.csv").samefile(tmp_path / "plots/ppo.csv")
    assert not (kept / "metrics/ppo.json").samefile(tmp_path / "metrics/ppo.json")


def test_an_execution_whose_process_has_died_counts_as_killed(tmp_path: Path) -> None:
    folder = pipeline(tmp_path)
    live = stage(tmp_path, folder, "ppo", end=None)
    assert record.executions(folder)[0]["status"] == "RUNNING"
    facts = record.read(live.folder / record.FACTS)
    record.write(live.folder / record.FACTS, facts | {"born": 1.0})
    assert record.executions(folder)[0]["status"] == "KILLED"
    record.write(live.folder / record.FACTS, facts | {"host": "elsewhere"})
    assert record.executions(folder)[0]["status"] == "RUNNING"
    long_ago = time.time() - (record.FOREIGN_HOURS + 1) * 3600
    for name in (record.FACTS, record.LIVE):
        os.utime(live.folder / name, (long_ago, long_ago))
    assert record.executions(folder)[0]["status"] == "KILLED", "also on another machine, after a day without a sign"


def test_what_has_arrived_is_removed_unless_a_stage_would_continue(tmp_path: Path) -> None:
    done, open_, waiting = (pipeline(tmp_path, key * 64) for key in "abc")
    stage(tmp_path, done, "ppo")
    stage(tmp_path, waiting, "ppo")
    stage(tmp_path, open_, "ppo", end="KILLED")
    pipeline(tmp_path, "b" * 64)  # the newest
    for folder in (done, open_):
        record.confirm(folder, "here", record.changed_ns(folder))
    record.prune(tmp_path, "here")
    assert set(record.pending(tmp_path)) == {open_, waiting}
    assert record.pending(tmp_path, "here") == [waiting]
    pipeline(tmp_path, "d" * 64)
    record.confirm(open_, "here", record.changed_ns(open_))
    record.prune(tmp_path, "here")
    assert open_ not in record.pending(tmp_path), "another run began: this one will not continue"


def test_what_is_written_after_the_clock_went_back_is_sent(tmp_path: Path) -> None:
    folder = pipeline(tmp_path)
    record.confirm(folder, "here", record.changed_ns(folder))
    assert record.pending(tmp_path, "here") == []
    os.utime(folder / record.RUN, (1.0, 1.0))
    assert record.pending(tmp_path, "here") == [folder]


def test_parameters_are_flattened_and_secrets_hidden() -> None:
    flat = record.flatten(
        {"ppo": {"kl": {"coef": 1e-4}, "pad_token": "<pad>", "stop": [1, 2]}, "a": None, "hub": {"token": "hf_x"}}
    )
    assert flat == {
        "ppo.kl.coef": "0.0001",
        "ppo.pad_token": "<pad>",
        "ppo.stop": "[1, 2]",
        "a": "null",
        "hub.token": "(hidden)",
    }
    assert json.loads(flat["ppo.stop"]) == [1, 2]


def test_a_job_that_continues_on_another_node_is_the_same_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = settings.workspace_id(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "another-node")
    assert settings.workspace_id(tmp_path) == before


def test_a_clone_at_the_same_path_of_another_machine_is_another_workspace(tmp_path: Path) -> None:
    """And a study of the same name there is another one."""
    here = settings.workspace_id(tmp_path), settings.study_label(tmp_path, "betas")
    shutil.rmtree(tmp_path / "work")
    there = settings.workspace_id(tmp_path), settings.study_label(tmp_path, "betas")
    assert not {*here} & {*there}
    assert {settings.name_of_study(label) for _, label in (here, there)} == {"betas"}


def test_a_worktree_is_recorded_in_its_main_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, tree = tmp_path / "home", tmp_path / "tree"
    (home / ".git/worktrees/tree").mkdir(parents=True)
    (home / "dvc.yaml").touch()
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {home}/.git/worktrees/tree\n", encoding="utf-8")
    assert record.folder_of(tree) == home / "work/tracking"
    monkeypatch.setenv(settings.HOLD_VARIABLE, "1")
    assert record.folder_of(tree) == tree / "work/tracking", "`leash verify` leaves nothing behind"
