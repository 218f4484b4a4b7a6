"""Ctrl-C and SIGTERM end `leash run` and everything that it started."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

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
    assert errors.startswith("error: stopped")
    assert [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    assert len(begun(root)) == 2, "a stopped stage was tried again"
