"""The locks of a run: one of the workspace, which the guardians of its commands hold too, and one of each execution of
a stage. The kernel releases them with their last holder, so the lock file of a dead process blocks nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from flows import processes
from flows.graph import Project, opened
from rlhf_core.errors import UserError
from rlhf_core.locks import FileLock, holder, is_held, who_holds
from tasks.tracking.settings import main_checkout

EXECUTIONS = Path("work") / "executions"
"""Locks of the executions at work, in the main checkout."""
POLL_SECONDS = 0.5

_held: dict[Path, Project] = {}


@contextmanager
def exclusive(root: Path) -> Iterator[Project]:
    """Hold the lock of the workspace at `root` within the block; the block can be nested. Waits for the stages of a
    killed run to stop.

    Raises UserError when another process holds it (two would run the same stages, or fail on DVC's locks), or when the
    project cannot be read.
    """
    if root in _held:
        yield _held[root]
        return
    path = root / "work" / "driver.lock"
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(path)
    if not lock.acquire() and not lock.acquire(patience(path, processes.STOPPING_SECONDS)):
        who = who_holds(path) or "it has just ended"
        raise UserError(f"another leash run works in this folder ({who}); wait for its end or stop it")
    try:
        with opened(root) as project, processes.keeping(lock.descriptor):
            _held[root] = project
            yield project
    finally:
        _held.pop(root, None)
        lock.release()


def patience(path: Path, seconds: float) -> float:
    """How many seconds to wait for the lock on `path`: none while the process that took it lives. After its kill
    `seconds`, which its guardians may need to stop its stages; that is printed."""
    if not is_held(path):
        return 0.0
    with suppress(psutil.NoSuchProcess):
        if psutil.Process(holder(path)).status() != psutil.STATUS_ZOMBIE:
            return 0.0
    print("the stages of a killed run are still stopping here; waiting for them", flush=True)
    return seconds


@contextmanager
def only_one(root: Path, key: str, on_line: Callable[[str], None]) -> Iterator[None]:
    """Wait while another workspace of this checkout runs a stage with the same key: DVC then restores what it has made.
    Raises processes.Stopped."""
    path = main_checkout(root) / EXECUTIONS / f"{key[:32]}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    if not lock.acquire():
        on_line(f"waits for its result from another workspace ({who_holds(path)})")
        while not lock.acquire(POLL_SECONDS):
            processes.raise_if_stopped()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # at worst two that wait run the stage both
        lock.release()
