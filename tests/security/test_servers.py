"""Whatever we start that listens is reached from this machine only. Checked on the running processes."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from flows import processes, server
from flows.server import _free_port
from tests.conftest import ROOT, clean_environment

LOOPBACK = {"127.0.0.1", "::1"}
GATHERING = """
import sys
from rlhf_core.training.processes import Processes

here = Processes()
assert here.gather([int(here.accelerator.process_index)]) == [0, 1]
print("met", flush=True)
sys.stdin.read()
"""


def listening(leader: psutil.Process) -> set[tuple[str, int]]:
    """The addresses at which a process and everything below it listen."""
    found = set()
    for process in [leader, *leader.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            at = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            found |= {(address.ip, address.port) for address in at}
    return found


@pytest.fixture
def mlflow_ui(tmp_path: Path, database: Path) -> Iterator[tuple[psutil.Process, int]]:
    """`leash ui`, as it is started; whether it answers is not waited for."""
    root = tmp_path / "ui"
    root.mkdir()
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    port = _free_port()
    environment = clean_environment() | {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": f"sqlite:///{database}"}
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "ui", "--port", str(port)],
        cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield psutil.Process(process.pid), port
    finally:
        processes.stop(process.pid, process, processes.SERVER_SIGNALS)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_servers_of_leash_up_and_leash_ui(
    mlflow_ui: tuple[psutil.Process, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`leash up` and the server lent to one run start in the same way."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    port = _free_port()
    try:
        server.up(tmp_path, port)
        places = listening(psutil.Process(int(server._record(tmp_path)["pid"])))
        assert ("127.0.0.1", port) in places
        assert {ip for ip, _ in places} <= LOOPBACK
    finally:
        server.down(tmp_path)
    ui, port = mlflow_ui
    deadline = time.monotonic() + 120
    while not server.answers(f"http://127.0.0.1:{port}") and time.monotonic() < deadline:
        time.sleep(0.2)
    places = listening(ui)
    assert ("127.0.0.1", port) in places
    assert {ip for ip, _ in places} <= LOOPBACK


@pytest.mark.slow
def test_the_meeting_point_of_a_stages_processes(tmp_path: Path) -> None:
    """What they exchange is unpickled, so that no other machine may join."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LEASH_RENDEZVOUS": str(tmp_path / "store")}
    base = clean_environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | world
    both = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", GATHERING], env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        assert [process.stdout.readline() for process in both if process.stdout] == ["met\n", "met\n"]
        places = {place for process in both for place in listening(psutil.Process(process.pid))}
        assert places
        assert {ip for ip, _ in places} <= LOOPBACK
    finally:
        for process in both:
            process.kill()
            process.communicate()
