"""A repository with an empty MLflow database, and a client for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tasks.tracking import settings
from tasks.tracking.tracker import PipelineIdentity


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
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
def pipeline() -> PipelineIdentity:
    params = {"seed": 1, "ppo": {"kl": {"coef": 0.1, "controller": "fixed"}, "clip_ratio": 0.2}}
    return PipelineIdentity("0123456789abcdef" * 4, params, commit="c0ffee", dirty=True)


@pytest.fixture
def look(root: Path) -> Callable[[], MlflowClient]:
    """A client; created late, so that the sender opens the database first."""
    return lambda: MlflowClient(f"sqlite:///{root}/mlflow.db")
