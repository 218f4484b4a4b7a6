"""`leash ui`: which page it names. That a server starts is in tests/security/test_servers.py."""

import os
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from flows.commands import ui
from flows.server import _free_port
from tasks.naming import experiment_name


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the process would have become."""
    found: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(os, "execve", lambda program, words, environment: found.append(words))
    return found


def test_it_names_the_page_of_the_projects_runs(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"sqlite:///{tmp_path.resolve() / 'mlflow.db'}"
    client = MlflowClient(uri, registry_uri=uri)
    client.create_experiment("another")
    experiment, port = client.create_experiment(experiment_name(tmp_path)), _free_port()
    ui.show(tmp_path, port)
    page = f"http://127.0.0.1:{port}/#/experiments/{experiment}/runs?workflowType=machine_learning"
    assert f"MLflow: {page} " in capsys.readouterr().out
    assert started[0][-2:] == ["--port", str(port)]


def test_before_the_first_run_it_names_the_server_and_makes_no_data_base(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    port = _free_port()
    ui.show(tmp_path, port)
    assert f"MLflow: http://127.0.0.1:{port}  (" in capsys.readouterr().out
    assert len(started) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_does_not_open_is_left_to_mlflow(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"no data base" * 100)
    port = _free_port()
    ui.show(tmp_path, port)
    assert f"MLflow: http://127.0.0.1:{port}  (" in capsys.readouterr().out
    assert len(started) == 1
