"""An MLflow server in trouble, and a real stage process that tracks to it: training is not held up, leaving is quick,
and in the end everything is in MLflow."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.tracking import MlflowClient

from tasks.tracking import record, settings
from tasks.tracking.exporter import export
from tests.faults.conftest import until

ROOT = Path(__file__).resolve().parents[2]
STEPS = 150
LONGEST_CALL_SECONDS = 0.05
GRAPH = """
stages:
  toy:
    cmd: python code.py
    deps: [code.py]
    params: [toy, seed]
    outs: [out.txt]
    metrics: [{metrics/toy.json: {cache: false}}]
"""
PARAMS = f"threads: 1\nseed: 1\nlong_rows: refuse\ntoy: {{steps: {STEPS}}}\n"
CODE = """
import json, time
from pathlib import Path
from rlhf_core.config.block import Block
from tasks.stage import pipeline_run
from tasks.stage.run import run
from tasks.tracking import record, sync

sync.FOLLOW_AFTER_SECONDS = 0.0
pipeline_run.SECONDS_AT_THE_END = 4.0

class Toy(Block):
    steps: int

calls = []

def ready_but_waiting():  # seconds that this thread waited for a processor: the machine's doing, not the call's
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0

def timed(name):
    function = getattr(record.Live, name)
    def measure(*args, **kwargs):
        begun, waited = time.perf_counter(), ready_but_waiting()
        try:
            return function(*args, **kwargs)
        finally:
            calls.append([name, time.perf_counter() - begun - (ready_but_waiting() - waited)])
            Path("calls.json").write_text(json.dumps(calls))
    return measure

for name in ("points", "tag", "end"):
    setattr(record.Live, name, timed(name))

def execute(stage):
    for step in range(1, stage.params.steps + 1):
        stage.track({"loss": 1.0 / step, "kl": float(step)}, step)
        time.sleep(0.01)
        while step == 20 and not Path("go").exists():
            time.sleep(0.01)
    stage.tag("leash.alert.toy", "seen")
    stage.out("out.txt").write_text("1\\n", encoding="utf-8")
    stage.write_metrics({"loss": 0.5})

run("toy", Toy, lambda: execute)
"""


@dataclass
class Server:
    """MLflow's own server, one thread a request, that can be stopped, frozen, or made to answer 500 after a while."""

    application: Any
    port: int
    behaviour: str = "well"
    thawed: threading.Event = field(default_factory=threading.Event)
    _server: Any = None

    @property
    def address(self) -> str:
        return f"http://user:hunter2@127.0.0.1:{self.port}"

    def start(self) -> None:
        from werkzeug.serving import make_server

        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def die(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def hang(self) -> None:
        self.behaviour = "hang"

    def fail(self) -> None:
        self.behaviour = "fail"

    def recover(self) -> None:
        self.behaviour = "well"
        self.thawed.set()
        if self._server is None:
            self.start()

    def _answer(self, environ: Any, start: Callable[..., Any]) -> Any:
        if self.behaviour == "hang":
            self.thawed.wait(60.0)
        if self.behaviour == "fail":
            time.sleep(0.3)
            start("500 INTERNAL SERVER ERROR", [("Content-Type", "text/plain")])
            return [b"broken"]
        return self.application(environ, start)


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory, database: Path) -> Iterator[Any]:
    """MLflow's server application with a data base of its own."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "mlflow.db").write_bytes(database.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("_MLFLOW_SERVER_FILE_STORE", f"sqlite:///{folder / 'mlflow.db'}")
        patch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "mlflow-artifacts:/")
        patch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", str(folder / "artifacts"))
        patch.setenv("_MLFLOW_SERVER_SERVE_ARTIFACTS", "true")
        from mlflow.server import app, handlers

        patch.setattr(handlers, "_tracking_store", None)
        patch.setattr(handlers, "_model_registry_store", None)
        yield app


@pytest.fixture
def server(application: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, value in settings.CLIENT_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        one = Server(application, probe.getsockname()[1])
    yield one
    one.thawed.set()
    one.die()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in (("dvc.yaml", GRAPH), ("params.yaml", PARAMS), ("code.py", CODE)):
        (folder / name).write_text(text, encoding="utf-8")
    for command in (["git", "init", "--quiet"], [sys.executable, "-m", "dvc", "init", "--quiet"]):
        subprocess.run(command, cwd=folder, check=True)
    return folder


def start(root: Path, address: str) -> "subprocess.Popen[str]":
    """`dvc repro` with tracking to `address`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": address}
    command = [sys.executable, "-m", "dvc", "repro"]
    return subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_of(root: Path, address: str) -> Any:
    """The one run of the stage in MLflow; None before there is one."""
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("leash")
    if experiment is None:
        return None
    query = f"tags.`leash.workspace` = '{settings.workspace_id(root)}' and tags.`leash.stage` = 'toy'"
    found = client.search_runs([experiment.experiment_id], query)
    assert len(found) <= 1, "a second run of one execution"
    return found[0] if found else None


def steps_of(run: Any, address: str, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in MlflowClient(address).get_metric_history(run.info.run_id, name)]


TROUBLES = {"down at start": None, "dies": Server.die, "hangs": Server.hang, "fails": Server.fail}


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_server_that_fails(trouble: str, server: Server, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strike, before = TROUBLES[trouble], None
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "leash")
    if strike is not None:
        server.start()
    process = start(root, server.address)
    if strike is not None:
        until(lambda: (run := run_of(root, server.address)) is not None and "toy/kl" in run.data.metrics)
        before = run_of(root, server.address)
        strike(server)
    (root / "go").touch()
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert "Traceback" not in printed
    assert "hunter2" not in printed
    assert all(b"hunter2" not in path.read_bytes() for path in (root / "work").rglob("*") if path.is_file())
    calls = json.loads((root / "calls.json").read_text())
    assert [(name, seconds) for name, seconds in calls if seconds > LONGEST_CALL_SECONDS] == []
    assert len(calls) > STEPS
    assert (root / "out.txt").read_text(encoding="utf-8") == "1\n"
    assert len(record.pending(root)) == 1, "the server was not in trouble"
    until(lambda: not sidecars(root), 20.0)

    server.recover()
    assert export(root, server.address) == []
    run = run_of(root, server.address)
    assert before is None or run.info.run_id == before.info.run_id
    assert run.info.status == "FINISHED"
    assert steps_of(run, server.address, "toy/kl") == [(step, float(step)) for step in range(1, STEPS + 1)]
    assert len(steps_of(run, server.address, "toy/loss")) == STEPS
    client = MlflowClient(server.address)
    parent = client.get_run(run.data.tags["mlflow.parentRunId"])
    assert run.data.metrics["loss"] == 0.5
    assert run.data.tags["leash.alert.toy"] == "seen"
    assert (parent.info.status, run.info.status) == ("FINISHED", "FINISHED")
    assert record.pending(root, settings.uri_mark(server.address)) == []


@pytest.mark.slow
def test_a_killed_sidecar_loses_nothing(server: Server, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "leash")
    server.start()
    process = start(root, server.address)
    until(lambda: (run := run_of(root, server.address)) is not None and "toy/kl" in run.data.metrics)
    (sidecar,) = sidecars(root)
    assert sidecar.nice() == 19
    sidecar.kill()
    (root / "go").touch()
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert run_of(root, server.address).info.status == "RUNNING"
    assert export(root, server.address) == []
    run = run_of(root, server.address)
    assert run.info.status == "FINISHED"
    assert steps_of(run, server.address, "toy/kl") == [(step, float(step)) for step in range(1, STEPS + 1)]


def sidecars(root: Path) -> list[psutil.Process]:
    """The processes beside the stages of this project."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if "tasks.tracking.sync" in words and str(root.resolve()) in words:
                found.append(process)
    return found
