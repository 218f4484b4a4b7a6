"""The lock of a workspace, which a run of the pipeline and its guardian hold from start to end. The kernel releases it
with its last holder, so the lock file of a dead process blocks nothing."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from flows import processes
from flows.graph import Project, opened
from flows.guardian import Guardian
from rlhf_core.errors import UserError
from rlhf_core.locks import FileLock

STOPPING_SECONDS = sum(seconds for _, seconds in processes.STAGE_SIGNALS) + 5.0
"""How long the guardian of a killed driver may take to end its stages."""

_held: dict[Path, Project] = {}


@contextmanager
def exclusive(root: Path) -> Iterator[Project]:
    """Hold the lock of the workspace at `root` within the block; the block can be nested.

    Raises UserError when another process holds it (two would run the same stages, or fail on DVC's locks), or when DVC
    cannot read the project.
    """
    if root in _held:
        yield _held[root]
        return
    path = root / "work" / "driver.lock"
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(path)
    if not lock.acquire() and not _wait_for_guardian(path, lock):
        raise UserError(_refusal(path))
    _write_owner(path)
    try:
        with opened(root) as project, processes.watched(Guardian(lock.descriptor)):
            _held[root] = project
            yield project
    finally:
        _held.pop(root, None)
        lock.release()


def _wait_for_guardian(path: Path, lock: FileLock) -> bool:
    """Whether the lock was acquired after all: its driver is dead, and the guardian has stopped the stages."""
    if _driver(path) is not None:
        return False
    print("the stages of a killed run are still stopping here; waiting for them", flush=True)
    return lock.acquire(STOPPING_SECONDS)


def _refusal(path: Path) -> str:
    driver = _driver(path)
    who = f"process {driver.pid}" if driver else f"a process that holds {path}"
    since = f", since {time.strftime('%H:%M:%S', time.localtime(driver.create_time()))}" if driver else ""
    return f"another leash run works in this folder ({who}{since}); wait for its end or stop it"


def _write_owner(path: Path) -> None:
    entry = {"pid": os.getpid(), "started": psutil.Process().create_time()}
    path.write_text(json.dumps(entry) + "\n", encoding="utf-8")


def _driver(path: Path) -> psutil.Process | None:
    """The process that wrote the lock file, if it lives."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        process = psutil.Process(int(entry["pid"]))
        alive = process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - float(entry["started"])) < 2.0
    except (OSError, ValueError, TypeError, KeyError, psutil.Error):
        return None
    return process if alive else None
