"""Ctrl-C and SIGTERM end `leash run` and `leash serve`, and everything that they started."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from tests.conftest import commit
from tests.faults.conftest import until

STAGES: dict[str, tuple[str, list[str]]] = {"one": ("sleep 120", []), "two": ("sleep 120", [])}


def begun(root: Path) -> list[int]:
    """The process ids of the stages that have begun."""
    log = root / "log.txt"
    return [int(line.split()[3]) for line in log.read_text().splitlines()] if log.exists() else []


def interrupt(process: "subprocess.Popen[str]") -> None:
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group


def terminate(process: "subprocess.Popen[str]") -> None:
    process.terminate()


@pytest.mark.slow
@pytest.mark.chosen("interrupt-130")
@pytest.mark.parametrize(("end", "code"), [(interrupt, 130), (terminate, 143)])
def test_nothing_is_left_running(
    toy: Callable[..., Path],
    leash: Callable[..., "subprocess.Popen[str]"],
    prefect_api: str,
    end: Callable[["subprocess.Popen[str]"], None],
    code: int,
) -> None:
    root = toy(STAGES)
    process = leash(root, "run", "--jobs", "2", api=prefect_api)
    until(lambda: len(begun(root)) == 2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert {child.pid for child in family} >= set(begun(root)), "the stages are not running"
    end(process)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert errors == "error: stopped; nothing is left running; the same command continues with one, two\n"
    assert [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    assert len(begun(root)) == 2, "a stopped stage was tried again"


@pytest.fixture
def importing(toy: Callable[..., Path]) -> Path:
    """A project whose one stage imports for a minute."""
    root = toy({})
    write = "open('begun', 'w').close(); time.sleep(60)"
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"one": {"cmd": f'python -c "import time; {write}"'}}}))
    return root


def assert_one_line(printed: str) -> None:
    assert "Traceback" not in printed
    assert "\nKeyboardInterrupt" not in printed
    assert "ERROR: " not in printed


def last_state(flow_run: str | None = None) -> str:
    """Name of the state of the flow run, or of the one that began last."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        if flow_run is None:
            [found] = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
        else:
            found = client.read_flow_run(flow_run)
        assert found.state is not None
        return str(found.state.name)


@pytest.mark.slow
@pytest.mark.chosen("terminate-143")
@pytest.mark.parametrize(("end", "code"), [(interrupt, 130), (terminate, 143)])
def test_a_stop_before_a_stage_handles_signals(
    importing: Path,
    leash: Callable[..., "subprocess.Popen[str]"],
    prefect_api: str,
    end: Callable[["subprocess.Popen[str]"], None],
    code: int,
) -> None:
    process = leash(importing, "run", api=prefect_api)
    until((importing / "begun").exists)
    end(process)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert errors == "error: stopped; nothing is left running; the same command continues with one\n"
    assert_one_line(printed)
    assert last_state() == "Cancelled"


@pytest.mark.slow
def test_a_scheduled_run_is_cancelled(
    importing: Path,
    leash: Callable[..., "subprocess.Popen[str]"],
    prefect_api: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound

    commit(importing)
    monkeypatch.setenv("PREFECT_RUNNER_POLL_FREQUENCY", "1")
    process = leash(importing, "serve", api=prefect_api)
    run = None
    deadline = time.monotonic() + 60.0
    while run is None and time.monotonic() < deadline:
        try:
            run = run_deployment("toy-nightly/leash", parameters={"branch": "HEAD"}, timeout=0)
        except ObjectNotFound:
            time.sleep(0.5)
    assert run is not None
    until(lambda: any((importing / "work/runs").glob("nightly-*/tree/begun")))
    terminate(process)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (143, "error: stopped; nothing is left running\n")
    assert_one_line(printed)
    assert last_state(run.id) == "Cancelled"
