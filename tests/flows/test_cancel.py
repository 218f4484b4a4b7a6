"""Ctrl-C and SIGTERM end `leash run` and `leash serve`, and everything that they started; the outputs stay."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

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
def made(toy: Callable[..., Path], serial: Callable[[Path], None]) -> Path:
    """A project whose one stage has run, and would now import for a minute."""
    root = toy({})
    stage = {
        "cmd": "echo 1 > one.out; echo 2 > one.json",
        "outs": ["one.out"],
        "metrics": [{"one.json": {"cache": False}}],
    }
    write = "open('begun', 'w').close(); time.sleep(60)"
    for command in (stage["cmd"], f'python -c "import time; {write}"'):
        (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"one": stage | {"cmd": command}}}))
        if command == stage["cmd"]:
            serial(root)
    return root


def started(root: Path) -> bool:
    """Whether the stage has begun; DVC has removed its outputs then."""
    if begun := (root / "begun").exists():
        assert not (root / "one.out").exists()
        assert not (root / "one.json").exists()
    return begun


def assert_as_before(root: Path, printed: str) -> None:
    assert (root / "one.out").read_text() == "1\n"
    assert (root / "one.json").read_text() == "2\n"
    assert "one: stopped; its outputs are those of before the run" in printed.replace("[1/1 one]", "one:")
    assert "Traceback" not in printed
    assert "ERROR: " not in printed


@pytest.mark.slow
def test_a_stop_before_a_stage_handles_signals(
    made: Path, leash: Callable[..., "subprocess.Popen[str]"], prefect_api: str
) -> None:
    process = leash(made, "run", api=prefect_api)
    until(lambda: started(made))
    interrupt(process)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "error: stopped; nothing is left running; the same command continues with one\n"
    assert_as_before(made, printed)


@pytest.mark.slow
def test_a_scheduled_run_is_cancelled(
    made: Path, leash: Callable[..., "subprocess.Popen[str]"], prefect_api: str
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound

    process = leash(made, "serve", api=prefect_api)
    run = None
    deadline = time.monotonic() + 60.0
    while run is None and time.monotonic() < deadline:
        try:
            run = run_deployment("leash/nightly", timeout=0)
        except ObjectNotFound:
            time.sleep(0.5)
    assert run is not None
    until(lambda: started(made))
    terminate(process)
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (143, "error: stopped; nothing is left running\n")
    assert_as_before(made, printed)
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run.id).state
    assert state is not None
    assert state.is_cancelled()
