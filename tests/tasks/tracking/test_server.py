"""A real MLflow server: it checks sources of models, may be slow, and older ones have no list of models."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow.tracking import MlflowClient

from tasks.tracking import record, settings
from tasks.tracking.sync import sync
from tests.tasks.tracking.conftest import evaluate, pipeline, runs, stage

MODELS = "/api/2.0/mlflow/logged-models"
SERVER = """
import sys, time
from mlflow.server import app
from werkzeug.serving import make_server

seconds, *missing = sys.argv[1:]
slow = iter([float(seconds)] * 3)

def answer(environ, start):
    time.sleep(next(slow, 0.0))
    if any(environ["PATH_INFO"].startswith(path) for path in missing):
        start("404 NOT FOUND", [("Content-Type", "text/html")])
        return [b"<h1>Not Found</h1>"]
    if "artifacts" in environ["PATH_INFO"] and environ["REQUEST_METHOD"] == "PUT" and "refuse" in missing:
        start("413 CONTENT TOO LARGE", [("Content-Type", "text/html")])
        return [b"too large"]
    return app(environ, start)

server = make_server("127.0.0.1", 0, answer, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""MLflow's server whose first three answers take some seconds, without the addresses that are named. A process of its
own: it sets MLflow's global address."""
Serve = Callable[..., str]


@pytest.fixture
def serve(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """serve(seconds, *addresses that it does not have) -> the address of a server with a database of its own."""
    (tmp_path / "server.db").write_bytes(empty_database.read_bytes())
    database = f"sqlite:///{tmp_path / 'server.db'}"
    environment = {
        "_MLFLOW_SERVER_FILE_STORE": database,
        "_MLFLOW_SERVER_REGISTRY_STORE": database,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(tmp_path / "artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    started: list[subprocess.Popen[str]] = []

    def start(seconds: float = 0.0, *missing: str) -> str:
        command = [sys.executable, "-c", SERVER, str(seconds), *missing]
        process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        return address

    yield start
    for process in started:
        process.kill()
        process.wait()


def evaluated(root: Path) -> Path:
    """An evaluation and a report that MLflow does not have."""
    folder = pipeline(root)
    evaluate(root, folder)
    stage(root, folder, "report", "3" * 64, {"report/index.html": "<p>"})
    return folder


@pytest.mark.slow
def test_a_server_takes_models_versions_description_and_report(root: Path, serve: Serve) -> None:
    server = serve()
    evaluated(root)
    assert sync(root) == ""
    client, name = MlflowClient(server, server), "a-repository-policy"
    version = client.get_model_version_by_alias(name, "current")
    assert version.source.startswith(f"dvc://models/policy?md5={'e' * 32}&project=%2F")
    parent = client.get_run(version.run_id)
    models = {model.name: model for model in client.search_logged_models([parent.info.experiment_id])}
    assert {metric.key: metric.value for metric in models["policy"].metrics}["gold"] == 3.0
    assert name in models["policy"].tags["mlflow.modelVersions"]
    assert parent.data.metrics["gold_policy"] == 3.0
    page = mlflow.artifacts.download_artifacts(version.tags["leash.report"], tracking_uri=server)
    assert Path(page).read_text(encoding="utf-8") == "<p>"


@pytest.mark.slow
def test_a_server_without_a_list_of_models_or_room_for_files_gets_the_rest(root: Path, serve: Serve) -> None:
    server = serve(0.0, MODELS, "refuse")
    evaluated(root)
    line = sync(root)
    assert line.startswith(f"tracking: not all is in MLflow at {server} (")
    assert "413" in line
    assert "\n" not in line
    client = MlflowClient(server, server)
    version = client.get_model_version_by_alias("a-repository-policy", "current")
    parent = client.get_run(version.run_id)
    assert (parent.info.status, parent.data.metrics["gold_policy"]) == ("FINISHED", 3.0)
    assert "413" in parent.data.tags["leash.missing"]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_whose_answers_take_six_seconds_receives_all(root: Path, serve: Serve) -> None:
    server = serve(6.0)
    stage(root, pipeline(root), "ppo", points=3)
    begun = time.monotonic()
    line = sync(root, 9.0)
    assert "not all was sent in 9 s" in line
    assert time.monotonic() - begun < 15, "the end of a run does not wait for ever"
    begun = time.monotonic()
    assert sync(root, None) == ""
    assert time.monotonic() - begun > 6, "all slow answers went to the process before"
    found = MlflowClient(server).get_experiment_by_name("a-repository")
    assert [run.info.status for run in MlflowClient(server).search_runs([found.experiment_id])] == ["FINISHED"] * 2


def test_a_server_that_is_down_costs_one_line_and_nothing_is_lost(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    stage(root, pipeline(root), "ppo", points=3)
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"http://user:hunter2@{address}")
        begun = time.monotonic()
        line = sync(root)
        assert time.monotonic() - begun < 2.0
    text = f"tracking: not all is in MLflow at http://{address} (Connection refused); `leash run --sync` tries again"
    assert line == text
    assert sync(root) == ""
    assert [run.info.status for run in runs(MlflowClient(f"sqlite:///{root}/mlflow.db"))] == ["FINISHED", "FINISHED"]
    assert record.pending(root, settings.uri_mark(settings.tracking_uri(root))) == []


def test_held_back_nothing_is_sent(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.HOLD_VARIABLE, "1")
    stage(root, pipeline(root), "ppo")
    assert sync(root) == ""
    assert len(record.pending(root)) == 1
