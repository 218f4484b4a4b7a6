"""The figures that MLflow gets of a stage, and the description of the pipeline run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.stage.definition import pipeline_identity
from tasks.stage.dvc_files import open_project
from tasks.stage.pipeline_run import models_of, numbers
from tasks.tracking import settings
from tasks.tracking.tracker import PipelineIdentity
from tests.conftest import call

EVALUATION = {
    "judge": "gold rubric",
    "win_rate": 0.8,
    "gold_policy": None,
    "pairs_too_long": 0,
    "seeds": [1, 2],
    "models": {
        "sft": {"gold": 1.0, "kl": 0.0, "win_rate": None, "entropy": 2.0},
        "policy": {"gold": 3.0, "kl": 2.5, "win_rate": 0.8, "recipe": None},
        "dpo": {"gold": 2.0, "kl": 1.5, "win_rate": 0.7},
    },
}


def test_the_run_of_a_stage_has_all_its_numbers() -> None:
    assert numbers(EVALUATION | {"enabled": True}) == {"win_rate": 0.8, "pairs_too_long": 0.0}


def test_the_models_of_the_evaluation_end_with_the_policy(tmp_path: Path) -> None:
    found = models_of("evaluate", tmp_path, EVALUATION)
    assert [one.name for one in found] == ["sft", "dpo", "policy"]
    assert found[0].figures == {"gold": 1.0, "kl": 0.0}
    assert found[2].figures == {"gold": 3.0, "kl": 2.5, "win_rate": 0.8}


def test_the_snapshots_are_models_with_their_step(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    rows = ("step,eta,kl,reward,gold", "0,0.0,0,0.5,", "4,1.0,1.7,3.8,2.4", "8,1.0,2.6,4.5,", "8,0.5,1.2,3.0,")
    (tmp_path / "plots/select.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    found = models_of("select", tmp_path, {})
    assert [(one.name, one.step) for one in found] == [("snapshot 4", 4), ("snapshot 8", 8)]
    assert found[0].figures == {"kl": 1.7, "reward": 3.8, "gold": 2.4}
    assert found[1].figures == {"kl": 2.6, "reward": 4.5}


def test_a_run_is_named_by_commit_seed_and_a_few_changes() -> None:
    one = PipelineIdentity("k", {"seed": 3}, "c0ffee00", True, ("seed=3 (1)", "ppo.kl.coef=0.2 (0.13)"))
    assert one.title == "c0ffee0+ seed 3, ppo.kl.coef=0.2"
    many = PipelineIdentity("k", {"seed": 3}, "c0ffee00", True, tuple(f"sft.x{number}=1 (2)" for number in range(9)))
    assert many.title == "c0ffee0+ seed 3"


def test_the_description_says_what_came_out_of_which_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.RUN_VARIABLE, "betas-seed=1")
    identity = PipelineIdentity("k", {}, "c0ffee00", True, ("ppo.kl.coef=0.2 (0.13)",), ("tasks/ppo.py",))
    lines = identity.note({"gold_policy": 3.39775, "win_rate": None}).split("\n\n")
    assert lines == [
        "gold_policy **3.4**",
        "DVC experiment `betas-seed=1`: `dvc exp apply betas-seed=1` brings its results back",
        "commit `c0ffee00`, with uncommitted changes in `tasks/ppo.py`; parameters changed since: "
        "`ppo.kl.coef=0.2 (0.13)`",
    ]


def test_the_identity_has_what_differs_from_the_commit(tmp_path: Path) -> None:
    """What a run writes and the block `runtime` are left out."""
    before = "seed: 1\nppo: {kl: {coef: 0.13}}\nsft: {old: 1}\nruntime: {tracking: true}\n"
    files = {"dvc.yaml": "stages: {}\n", "dvc.lock": "{}\n", "params.yaml": before, "code.py": ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    call(tmp_path, "git", "init", "--quiet")
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").touch()
    call(tmp_path, "git", "add", "--all")
    call(tmp_path, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "a commit")
    (tmp_path / "dvc.lock").write_text("schema: '2.0'\n", encoding="utf-8")
    (tmp_path / "code.py").write_text("pass\n", encoding="utf-8")
    with open_project(tmp_path) as project:
        found = pipeline_identity(project, {"seed": 1, "ppo": {"kl": {"coef": 0.2}}, "runtime": {"tracking": False}})
    changed = [one for one in found.changes if not one.endswith(".enabled=none (false)")]
    assert changed == ["ppo.kl.coef=0.2 (0.13)", "sft.old=none (1)"]
    assert found.edited == ("code.py",)
