"""What becomes of an alert of PPO in a real run of the stage: log, metrics, samples, MLflow, and `runtime.on_alert`."""

from typing import TYPE_CHECKING, Any

import pytest
from mlflow.tracking import MlflowClient

from tasks.tracking.exporter import export

if TYPE_CHECKING:
    from tests.conftest import Project

OUTS = ("metrics/ppo.json", "plots/ppo.csv", "data/ppo/samples.jsonl", "models/snapshots/step-000004.safetensors")


@pytest.fixture
def failing(finished: "Project") -> "Project":
    """The tiny run with a learning rate a thousand times too high for its PPO."""
    finished.set("ppo.learning_rate", 0.1)
    return finished


def outs(project: "Project") -> dict[str, bytes]:
    return {name: (project.root / name).read_bytes() for name in OUTS}


def alerts(project: "Project") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = project.json("metrics/ppo.json")["alerts"]
    return found


def test_the_healthy_tiny_run_has_none(finished: "Project") -> None:
    assert alerts(finished) == []
    assert {row["reason"] for row in finished.rows("data/ppo/samples.jsonl")} == {"schedule"}


@pytest.mark.slow
def test_warn_tells_log_metrics_samples_and_mlflow(failing: "Project") -> None:
    done = failing.stage("ppo")
    assert done.returncode == 0, done.stderr
    (alert,) = alerts(failing)
    assert alert["name"] == "kl_spike"
    assert f"ALERT kl_spike at step {alert['step']}: {alert['message']}. What helps: {alert['remedy']}" in done.stdout
    moment = [row for row in failing.rows("data/ppo/samples.jsonl") if "kl_spike" in row["reason"].split(", ")]
    assert len(moment) == 20
    assert {row["step"] for row in moment} == {alert["step"]}
    address = f"sqlite:///{failing.root / 'mlflow.db'}"
    export(failing.root, address)
    client = MlflowClient(address)
    (experiment,) = [found for found in client.search_experiments() if found.name == "leash"]
    tagged = [run for run in client.search_runs([experiment.experiment_id]) if "leash.alert.kl_spike" in run.data.tags]
    assert [run.data.tags["leash.stage"] for run in tagged] == ["ppo"]
    history = {point.step: point.value for point in client.get_metric_history(tagged[0].info.run_id, "ppo/alerts")}
    assert history.keys() == {1, 2, 3, 4}
    assert history[alert["step"]] >= 1


@pytest.mark.slow
def test_stop_ends_the_stage_and_warn_goes_on_from_there(failing: "Project") -> None:
    """Exit 2, one line with alert, remedy and where to look; again the same; in the end what an undisturbed run
    makes, byte for byte."""
    failing.set("runtime.on_alert", "stop")
    stopped = failing.stage("ppo")
    assert stopped.returncode == 2, stopped.stdout + stopped.stderr
    (line,) = [line for line in stopped.stderr.splitlines() if line.startswith("ppo: ")]
    assert line.startswith("ppo: stopped by kl_spike at step ")
    assert "drop learning_rate by an order of magnitude" in line
    (folder,) = (failing.root / "work" / "ppo").glob("*/stopped")
    assert str(folder.relative_to(failing.root)) in line
    place = folder.relative_to(failing.root).as_posix()
    (alert,) = failing.rows(f"{place}/alerts.jsonl")
    assert len(failing.rows(f"{place}/history.jsonl")) == alert["step"]
    assert sum("kl_spike" in row["reason"] for row in failing.rows(f"{place}/samples.jsonl")) == 20
    assert failing.stage("ppo").returncode == 2

    failing.set("runtime.on_alert", "warn")
    resumed = failing.stage("ppo")
    assert resumed.returncode == 0, resumed.stderr
    assert f"continues after step {alert['step']}" in resumed.stdout
    interrupted = outs(failing)
    assert failing.stage("ppo").returncode == 0
    assert outs(failing) == interrupted
