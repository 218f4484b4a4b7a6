"""Runs of isolated workspaces are tracked in the checkout that they were made from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tasks.tracking import outbox, settings
from tasks.tracking.sender import drain
from tasks.tracking.tracker import PipelineIdentity, Tracker, finish_study
from tests.conftest import call

Look = Callable[[], MlflowClient]


@pytest.fixture
def home(root: Path) -> Path:
    """A checkout with one commit."""
    (root / "dvc.yaml").write_text("stages: {}\n")
    (root / ".git").exists() or call(root, "git", "init", "--quiet")
    call(root, "git", "add", "dvc.yaml")
    call(root, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "a commit")
    return root


@pytest.fixture
def tree(home: Path) -> Path:
    """A worktree of it."""
    call(home, "git", "worktree", "add", "--quiet", "--detach", "work/runs/one/tree")
    return home / "work/runs/one/tree"


def track(root: Path, pipeline: PipelineIdentity, stage: str = "sft") -> None:
    tracker = Tracker.open(root, stage, "ab" * 32, pipeline, send=False, system_seconds=0)
    tracker.metrics({"sft/loss": 1.0}, step=1)
    tracker.close_parent("FINISHED")
    tracker.close("FINISHED")


def runs(look: Look) -> dict[str, dict[str, str]]:
    """Name → tags of every run."""
    client = look()
    (experiment,) = [one for one in client.search_experiments() if one.name == settings.EXPERIMENT]
    return {run.info.run_name: dict(run.data.tags) for run in client.search_runs([experiment.experiment_id])}


def test_the_main_checkout(home: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.main_checkout(home) == home
    assert settings.main_checkout(tree) == home
    temporary = home / ".dvc/tmp/exps/standalone/tmpabc"
    temporary.mkdir(parents=True)
    assert settings.main_checkout(temporary) == home.resolve()
    monkeypatch.setenv(settings.HOLD_VARIABLE, "1")
    assert settings.main_checkout(tree) == tree


def test_a_worktree_with_a_relative_link(home: Path, tree: Path) -> None:
    """git writes such links with worktree.useRelativePaths."""
    (tree / ".git").write_text("gitdir: ../../../../.git/worktrees/tree\n")
    assert settings.main_checkout(tree) == home.resolve()


def test_a_worktree_that_is_removed_loses_nothing(
    home: Path, tree: Path, pipeline: PipelineIdentity, look: Look
) -> None:
    track(tree, pipeline)
    assert not (tree / "work").exists()
    assert len(outbox.pending(home)) == 1
    shutil.rmtree(tree)
    assert drain(home).left == 0
    assert set(runs(look)) == {"c0ffee+ seed 1", "sft"}


def test_two_workspaces_with_one_key_have_runs_of_their_own(
    home: Path, tree: Path, pipeline: PipelineIdentity, look: Look
) -> None:
    """The younger does not wait for the older one, which still writes."""
    older = Tracker.open(home, "sft", "ab" * 32, pipeline, send=False, system_seconds=0)
    track(tree, pipeline)
    assert drain(tree, timeout=20).left == 0
    older.close("FINISHED")
    assert drain(home).left == 0
    client = look()
    (experiment,) = [one for one in client.search_experiments() if one.name == settings.EXPERIMENT]
    found = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in found) == ["c0ffee+ seed 1"] * 2 + ["sft"] * 2
    assert len({run.data.tags["leash.workspace"] for run in found}) == 2


def test_trials_are_children_of_their_study(
    home: Path, tree: Path, pipeline: PipelineIdentity, look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(settings.RUN_VARIABLE, "betas-coef=0.1")
    monkeypatch.setenv(settings.STUDY_VARIABLE, "betas")
    track(tree, replace(pipeline, changes=("ppo.kl.coef=0.1 (0.13)",)))
    page = tmp_path / "index.html"
    page.write_text("<!doctype html>")
    for _ in range(2):
        assert finish_study(home, "betas", "FINISHED", {"trials_finished": 1.0}, [page, tmp_path / "absent"]) == ""
    found = runs(look)
    assert set(found) == {"betas", "betas-coef=0.1", "sft"}
    trial = found["betas-coef=0.1"]
    assert trial["leash.experiment"] == "betas-coef=0.1"
    assert "ppo.kl.coef=0.1" in trial["mlflow.note.content"]
    client = look()
    study = client.get_run(trial["mlflow.parentRunId"])
    assert (study.info.run_name, study.info.status) == ("betas", "FINISHED")
    assert study.data.metrics == {"trials_finished": 1.0}
    assert [file.path for file in client.list_artifacts(study.info.run_id)] == ["index.html"]
    os.environ.pop(settings.RUN_VARIABLE)
