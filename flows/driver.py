"""One driver a workspace: the lock that a run of the pipeline holds from its start to its end, its guardian's included.
The kernel lets it go with its last holder, so that a lock file of a dead process never stands in anybody's way."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from flows import processes
from rlhf_core.errors import UserError
from rlhf_core.locks import FileLock

STOPPING_SECONDS = sum(seconds for _, seconds in processes.STAGE_LADDER) + 5.0
"""How long the guardian of a killed driver may take to end its stages."""

_held: set[Path] = set()


@contextmanager
def sole(root: Path) -> Iterator[None]:
    """This process alone drives the pipeline at `root` while the block lasts; within one process it may be entered
    again.

    Raises UserError when another one does: two would run the same stages, or fail on DVC's locks one after another.
    """
    if root in _held:
        yield
        return
    path = root / "work" / "driver.lock"
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(path)
    if not lock.acquire() and not _outlast(path, lock):
        raise UserError(_refusal(path))
    _note(path)
    _held.add(root)
    processes.guard(lock.descriptor)
    try:
        yield
    finally:
        processes.dismiss()
        _held.discard(root)
        lock.release()


def _outlast(path: Path, lock: FileLock) -> bool:
    """Whether the lock came free: it does when its driver is dead and the guardian has stopped what that left."""
    if _driver(path) is not None:
        return False
    print("a run that was killed here is being stopped; waiting for the end of its stages", flush=True)
    return lock.acquire(STOPPING_SECONDS)


def _refusal(path: Path) -> str:
    driver = _driver(path)
    who = f"process {driver.pid}" if driver else f"a process that holds {path}"
    since = f", since {time.strftime('%H:%M:%S', time.localtime(driver.create_time()))}" if driver else ""
    return f"another leash run is at work in this folder ({who}{since}); wait for its end or stop it"


def _note(path: Path) -> None:
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
