"""`leash sync`: what MLflow lacks arrives, what cannot arrive stays and is named."""

import shutil
import socket
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from flows.commands.sync import sync
from tasks.tracking import record, settings
from tests.tasks.tracking.conftest import pipeline, runs, stage


@pytest.fixture
def root(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a stage that MLflow does not have."""
    shutil.copy2(database, tmp_path / "mlflow.db")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in settings.CLIENT_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "params.yaml").write_text("seed: 1\n", encoding="utf-8")
    stage(tmp_path, pipeline(tmp_path), "ppo", points=2)
    return tmp_path


def test_what_is_missing_is_sent(root: Path) -> None:
    expected = (f"MLflow at sqlite:///{root}/mlflow.db has all that was run here", True)
    assert sync(root, 60.0) == expected
    assert [run.info.status for run in runs(MlflowClient(f"sqlite:///{root}/mlflow.db"))] == ["FINISHED", "FINISHED"]
    assert sync(root, 60.0) == expected


def test_what_cannot_arrive_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://somebody:hunter2@{address}")
    printed, done = sync(root, 20.0)
    assert not done
    assert f"http://{address} (Connection refused); `leash sync` tries again" in printed
    assert "hunter2" not in printed
    assert record.pending(root)
