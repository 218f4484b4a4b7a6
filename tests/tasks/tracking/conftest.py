"""A repository with an empty MLflow database, a client for it, and records of pipeline runs without DVC."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from tasks.tracking import record, settings

EVALUATION = {
    "judge": "gold rubric",
    "win_rate": 0.8,
    "gold_policy": 3.0,
    "alignment_tax": None,
    "models": {
        "sft": {"gold": 1.0, "kl": 0.0, "win_rate": None, "entropy": 2.0},
        "policy": {"gold": 3.0, "kl": 2.5, "win_rate": 0.8, "recipe": None},
    },
}
PARAMS = {"seed": "1", "ppo.kl.coef": "0.05", "ppo.clip_ratio": "0.2", "reward.epochs": "3"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.CLIENT_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables of MLflow, created once, because it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.CLIENT_ENVIRONMENT.items():
            patch.setenv(name, value)
        path = tmp_path_factory.mktemp("database") / "mlflow.db"
        MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def root(tmp_path: Path, empty_database: Path) -> Path:
    folder = tmp_path / "a repository"  # the space is on purpose
    folder.mkdir()
    shutil.copyfile(empty_database, folder / "mlflow.db")
    return folder


@pytest.fixture
def look(root: Path) -> Callable[[], MlflowClient]:
    """A client; created late, so that the exporter opens the database first."""
    return lambda: MlflowClient(f"sqlite:///{root}/mlflow.db")


def pipeline(root: Path, key: str = "a" * 64, params: dict[str, str] | None = None, **more: Any) -> Path:
    """The record of a pipeline run."""
    run = {"key": key, "workspace": settings.workspace_id(root), "root": str(root), "params": PARAMS | (params or {}),
           "tags": {"leash.commit": "c0ffee00" * 5, "leash.dirty": "false", "leash.data": "d"}}  # fmt: skip
    return record.open_record(root, run | more)


def stage(
    root: Path,
    folder: Path,
    name: str,
    key: str = "b" * 64,
    files: dict[str, Any] | None = None,
    points: int = 0,
    end: record.Status | None = "FINISHED",
    inputs: dict[str, str] | None = None,
) -> record.Live:
    """A stage that logs so many points of `<name>/kl`, writes these files, and ends."""
    for path, content in (files or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    facts = {"stage": name, "key": key, "params": {f"{name}.a": "1"}, "inputs": inputs or {}}
    live = record.Live(root, folder, facts)
    for step in range(1, points + 1):
        live.points({f"{name}/kl": step / 10}, step)
    if end:
        live.end(end)
    return live


def evaluate(root: Path, folder: Path, policy: str = "e" * 32, key: str = "e" * 64) -> None:
    """A finished evaluation of the policy with this DVC hash."""
    answers = [
        {"prompt_id": "1", "prompt": "p", "model": name, "response": name, "seed": 7} for name in ("sft", "policy")
    ]
    files = {
        "metrics/evaluate.json": EVALUATION,
        "metrics/summary.json": {"gold_policy": 3.0, "win_rate": 0.8, "reward_accuracy": 0.9, "alerts": 1},
        "plots/frontier.csv": "kl,gold\n1,2\n",
        "data/evaluate/answers.jsonl": "".join(json.dumps(row) + "\n" for row in answers),
        "data/evaluate/samples.jsonl": json.dumps({"sft": "s", "prompt": [{"role": "user", "content": "Hi"}],
                                                   "policy": "p"}),
    }  # fmt: skip
    stage(
        root,
        folder,
        "evaluate",
        key,
        files,
        inputs={"models/policy": policy, "data/ingest/evaluation_prompts.jsonl": "f" * 32},
    )


def runs(client: MlflowClient, experiment: str | None = None) -> list[Run]:
    """All runs of the experiment (None: of all): pipelines first, then stages, the oldest first."""
    found = [one.experiment_id for one in client.search_experiments() if experiment in (None, one.name)]
    runs = client.search_runs(found, order_by=["attributes.start_time ASC"])
    return sorted(runs, key=lambda run: "leash.stage" in run.data.tags)
