"""`leash sync`: what waits for MLflow arrives, what cannot arrive stays and is named, a held-back stage only waits."""

import shutil
import socket
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from flows.commands.sync import sync
from tasks.tracking import outbox, settings
from tasks.tracking.tracker import PipelineIdentity, Tracker

KEY = "ab" * 32


@pytest.fixture
def root(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two metrics of the stage `ppo` that were not sent."""
    shutil.copy2(database, tmp_path / "mlflow.db")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in settings.CLIENT_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        patch.setenv(settings.HOLD_VARIABLE, "1")
        tracker = Tracker.open(tmp_path, "ppo", KEY, PipelineIdentity("0" * 64, {}), system_seconds=0)
        tracker.metrics({"ppo/kl": 1.5}, step=1)
        tracker.metrics({"ppo/kl": 2.5}, step=2)
        assert not tracker.close()
    return tmp_path


def kl(root: Path) -> list[float]:
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name("leash")
    runs = client.search_runs([experiment.experiment_id], "tags.`leash.stage` = 'ppo'") if experiment else []
    return [point.value for run in runs for point in client.get_metric_history(run.info.run_id, "ppo/kl")]


def test_a_held_back_stage_waits_until_it_is_sent(root: Path) -> None:
    assert len(outbox.pending(root)) == 1, "nothing was sent by itself"
    printed, done = sync(root, 60.0)
    assert done
    assert printed.splitlines() == [
        f"to sqlite:///{root}/mlflow.db",
        f"ppo-abababababab-{settings.workspace_id(root)}: 5 events sent",
    ]
    assert kl(root) == [1.5, 2.5]
    assert sync(root, 60.0) == ("nothing waits for MLflow", True)


def test_what_cannot_arrive_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://somebody:hunter2@{address}")
    printed, done = sync(root, 20.0)
    assert not done
    lines = printed.splitlines()
    assert lines[0] == f"to http://{address}"
    assert lines[1].startswith(f"ppo-abababababab-{settings.workspace_id(root)}: 0 events sent; 5 left (")
    assert lines[2] == "1 of 1 outboxes still wait; `leash sync` tries again"
    assert "hunter2" not in printed
    assert outbox.pending(root)


def test_an_outbox_that_is_being_written_is_no_failure(root: Path) -> None:
    box = outbox.Outbox.create(root, "sft-0123456789ab", print)
    printed, done = sync(root, 60.0)
    assert done
    assert "sft-0123456789ab: 0 events sent; 0 left (a running process writes it)" in printed.splitlines()
    box.close()
