"""Prefect's server dies, hangs, or loses its driver in the middle of `leash run`: what the stages made is kept, nothing
is left running, and the same command continues."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf_core.locks import holder
from tests.conftest import RECORDED, ROOT, clean_environment
from tests.faults.conftest import log_of, until

Toy = Callable[..., Path]
Leash = Callable[..., Any]
STAGES: dict[str, tuple[str, list[str]]] = {"one": ("wait", []), "two": ("crash 1", ["one"])}


def family_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def servers(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if alive(one) and "prefect" in one.cmdline()]


@pytest.fixture
def running(toy: Toy, tmp_path: Path) -> Iterator[Callable[..., tuple[Path, Any, list[psutil.Process]]]]:
    """Starts a run whose first stage waits for the file `go`, with its temporary server and these variables in its
    environment; the project, the run, and all processes below it."""
    started: list[psutil.Process] = []

    def begin(**environment: str) -> tuple[Path, Any, list[psutil.Process]]:
        root = toy(STAGES)
        places = {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path / "prefect")}
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "run", "--retry-delay", "0.1"], cwd=root,
            env=clean_environment() | RECORDED | places | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        started.append(psutil.Process(process.pid))
        until(lambda: "one begin" in log_of(root) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        family = family_of(process.pid)
        started.extend(family)
        return root, process, family

    yield begin
    for one in started:
        if alive(one):
            one.kill()


def kill(server: psutil.Process) -> None:
    server.kill()
    until(lambda: not alive(server))


def freeze(server: psutil.Process) -> None:
    server.suspend()


@pytest.mark.slow
@pytest.mark.chosen("kill")
@pytest.mark.parametrize("strike", [kill, freeze])
def test_a_server_lost_in_mid_flow(strike: Callable[[psutil.Process], None], running: Any, serial: Any) -> None:
    root, process, family = running(PREFECT_CLIENT_MAX_RETRIES="1", PREFECT_API_REQUEST_TIMEOUT="4")
    (server,) = servers(family)
    strike(server)
    (root / "go").touch()
    printed, errors = process.communicate(timeout=400)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert line.startswith("error: the Prefect server (http://127.0.0.1:")
    assert "the results of the stages are kept, and the same command continues" in line
    table = [line.split()[:2] for line in printed.splitlines()[-3:-1]]
    assert table == [["one", "ran"], ["two", "ran"]], printed
    assert log_of(root).count("two begin") == 2, "a crash is tried again without a server, too"
    until(lambda: not any(alive(one) for one in family), 15.0)
    before, lock = log_of(root), (root / "dvc.lock").read_bytes()
    serial(root)
    assert (log_of(root), (root / "dvc.lock").read_bytes()) == (before, lock), "nothing was left to do"


@pytest.mark.slow
def test_a_run_cut_off_by_its_server_is_stopped_at_once_by_an_interrupt(running: Any) -> None:
    root, process, family = running()
    (server,) = servers(family)
    kill(server)
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors == "error: stopped; nothing is left running; the same command continues with one\n"
    assert time.monotonic() - begun < 90.0, "Prefect alone tries to reach its server for minutes"
    until(lambda: not any(alive(one) for one in family), 15.0)
    assert log_of(root) == ["one begin"]


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_running_and_the_next_waits_for_that(
    running: Any, leash: Leash, prefect_api: str
) -> None:
    root, process, family = running()
    assert len(servers(family)) == 1
    stage = [one for one in family if alive(one) and "worker.py" in one.cmdline()]
    assert len(stage) >= 1
    process.kill()
    process.wait()
    again = leash(root, "run", api=prefect_api)
    until(lambda: not any(alive(one) for one in family), 30.0)
    (root / "go").touch()
    printed, errors = again.communicate(timeout=120)
    assert again.returncode == 0, printed + errors
    assert log_of(root)[:3] == ["one begin", "one begin", "one end"], "the killed run's stage went on"
    assert holder(root / "work" / "driver.lock") == again.pid
    assert (root / ".dvc" / "tmp" / "rwlock").read_text() == "{}"
