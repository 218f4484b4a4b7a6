"""What differs on a real MLflow server: it checks sources of models, and older ones have no list of models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow.tracking import MlflowClient

from tasks.tracking.sender import drain
from tasks.tracking.tracker import PipelineIdentity, Tracker

MODELS = "/api/2.0/mlflow/logged-models"
SERVER = """
import sys
from mlflow.server import app
from werkzeug.serving import make_server

def answer(environ, start):
    if any(environ["PATH_INFO"].startswith(path) for path in sys.argv[1:]):
        start("404 NOT FOUND", [("Content-Type", "text/html")])
        return [b"<h1>Not Found</h1>"]
    return app(environ, start)

server = make_server("127.0.0.1", 0, answer, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""MLflow's server without the addresses that are named. A process of its own: it sets MLflow's global address."""


@pytest.fixture
def serve(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """serve(*addresses that it does not have) -> the address of a server with a database of its own."""
    (tmp_path / "server.db").write_bytes(empty_database.read_bytes())
    database = f"sqlite:///{tmp_path / 'server.db'}"
    settings = {
        "_MLFLOW_SERVER_FILE_STORE": database,
        "_MLFLOW_SERVER_REGISTRY_STORE": database,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(tmp_path / "artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    started: list[subprocess.Popen[str]] = []

    def start(*missing: str) -> str:
        command = [sys.executable, "-c", SERVER, *missing]
        process = subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        return address

    yield start
    for process in started:
        process.kill()
        process.wait()


def evaluated(root: Path, pipeline: PipelineIdentity) -> list[str]:
    """Send the figures of an evaluation; the warnings."""
    page = root / "index.html"
    page.write_text("<p>", encoding="utf-8")
    tracker = Tracker.open(root, "evaluate", "ab" * 32, pipeline, send=False, system_seconds=0)
    tracker.model("policy", "model", {"gold": 3.0}, md5="e" * 32)
    tracker.register_policy("e" * 32, {"gold_policy": 3.0})
    tracker.headline({"gold_policy": 3.0})
    tracker.dataset("raw", "data/raw", "d" * 32, "raw data")
    tracker.describe({"gold_policy": 3.0}, page)
    tracker.close("FINISHED")
    warnings: list[str] = []
    assert drain(root, warn=warnings.append).left == 0
    return warnings


@pytest.mark.slow
def test_a_server_takes_models_versions_description_and_report(
    root: Path, pipeline: PipelineIdentity, serve: Callable[..., str]
) -> None:
    server = serve()
    assert evaluated(root, pipeline) == []
    client = MlflowClient(server, server)
    version = client.get_model_version_by_alias("leash-policy", "current")
    assert version.source.startswith(f"dvc://models/policy?md5={'e' * 32}&project=%2F")
    parent = client.get_run(version.run_id)
    (model,) = client.search_logged_models([parent.info.experiment_id])
    assert {metric.key: metric.value for metric in model.metrics} == {"gold": 3.0}
    assert "leash-policy" in model.tags["mlflow.modelVersions"]
    assert parent.data.metrics == {"gold_policy": 3.0}
    assert parent.inputs.dataset_inputs[0].dataset.name == "raw"
    page = mlflow.artifacts.download_artifacts(version.tags["leash.report"], tracking_uri=server)
    assert Path(page).read_text(encoding="utf-8") == "<p>"


@pytest.mark.slow
def test_a_server_without_a_list_of_models_gets_the_rest(
    root: Path, pipeline: PipelineIdentity, serve: Callable[..., str]
) -> None:
    server = serve(MODELS)
    (warning,) = evaluated(root, pipeline)
    assert warning.startswith("tracking: MLflow refused a model event (")
    client = MlflowClient(server, server)
    version = client.get_model_version_by_alias("leash-policy", "current")
    assert client.get_run(version.run_id).data.metrics == {"gold_policy": 3.0}
