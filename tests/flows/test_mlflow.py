"""`leash ui` and `leash run --sync`. That the page of `leash ui` starts is in tests/security/test_servers.py."""

import os
import shutil
import socket
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from flows import cli, processes
from flows.server import _free_port
from tasks.naming import experiment_name
from tasks.tracking import record, settings
from tests.tasks.tracking.conftest import pipeline, runs, stage


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project in the current folder, with nothing tracked."""
    (tmp_path / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path.parent / "prefect"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(processes, "install_signal_handlers", lambda: None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the process would have become."""
    found: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda program, words, environment: found.append(words))
    return found


def test_it_names_the_page_of_the_projects_runs(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"sqlite:///{tmp_path.resolve() / 'mlflow.db'}"
    client = MlflowClient(uri, registry_uri=uri)
    client.create_experiment("another")
    experiment, port = client.create_experiment(experiment_name(tmp_path)), _free_port()
    cli.ui(port=port)
    page = f"http://127.0.0.1:{port}/#/experiments/{experiment}/runs?workflowType=machine_learning"
    assert f"MLflow: {page} " in capsys.readouterr().out
    assert started[0][-2:] == ["--port", str(port)]


def test_before_the_first_run_it_names_the_server_and_makes_no_data_base(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    port = _free_port()
    cli.ui(port=port)
    assert f"MLflow: http://127.0.0.1:{port}  (" in capsys.readouterr().out
    assert len(started) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["dvc.yaml"]


def test_a_database_that_does_not_open_is_left_to_mlflow(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"no data base" * 100)
    port = _free_port()
    cli.ui(port=port)
    assert f"MLflow: http://127.0.0.1:{port}  (" in capsys.readouterr().out
    assert len(started) == 1


@pytest.fixture
def unsent(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project has a stage that MLflow does not have."""
    shutil.copy2(database, tmp_path / "mlflow.db")
    for name, value in settings.CLIENT_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "params.yaml").write_text("seed: 1\n", encoding="utf-8")
    stage(tmp_path, pipeline(tmp_path), "ppo", points=2)


@pytest.mark.usefixtures("unsent")
def test_what_is_missing_is_sent(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for _ in range(2):
        found = CliRunner().invoke(cli.app, ["run", "--sync", "--timeout", "60"])
        assert found.stdout == f"MLflow at {uri} has all that was run here\n"
        assert [run.info.status for run in runs(MlflowClient(uri))] == ["FINISHED", "FINISHED"]


@pytest.mark.usefixtures("unsent")
def test_what_cannot_arrive_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:hunter2@{address}")
    found = CliRunner().invoke(cli.app, ["run", "--sync", "--timeout", "20"])
    assert found.exit_code == 1
    assert f"http://{address} (Connection refused); `leash run --sync` tries again" in found.output
    assert "hunter2" not in found.output
    assert record.pending(tmp_path)


def test_sync_runs_no_stage(tmp_path: Path) -> None:
    found = CliRunner().invoke(cli.app, ["run", "--sync", "ppo"])
    assert (found.exit_code, found.stderr.startswith("error: --sync runs no stage")) == (2, True)
