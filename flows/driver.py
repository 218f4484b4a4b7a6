"""The lock of a workspace, which a run of the pipeline and its guardian hold from start to end. The kernel releases it
with its last holder, so the lock file of a dead process blocks nothing."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from flows import processes
from flows.graph import Project, opened
from flows.guardian import Guardian
from rlhf_core.errors import UserError
from rlhf_core.locks import FileLock, holder, who_holds

STOPPING_SECONDS = sum(seconds for _, seconds in processes.STAGE_SIGNALS) + 5.0
"""How long the guardian of a killed driver may take to end its stages."""

_held: dict[Path, Project] = {}


@contextmanager
def exclusive(root: Path) -> Iterator[Project]:
    """Hold the lock of the workspace at `root` within the block; the block can be nested.

    Raises UserError when another process holds it (two would run the same stages, or fail on DVC's locks), or when the
    project cannot be read.
    """
    if root in _held:
        yield _held[root]
        return
    path = root / "work" / "driver.lock"
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(path)
    if not lock.acquire() and not _wait_for_guardian(path, lock):
        who = who_holds(path) or "it has just ended"
        raise UserError(f"another leash run works in this folder ({who}); wait for its end or stop it")
    try:
        with opened(root) as project, processes.watched(Guardian(lock.descriptor)):
            _held[root] = project
            yield project
    finally:
        _held.pop(root, None)
        lock.release()


def _wait_for_guardian(path: Path, lock: FileLock) -> bool:
    """Whether the lock was acquired after all: its driver is dead, and the guardian has stopped the stages."""
    with suppress(psutil.NoSuchProcess):
        if psutil.Process(holder(path)).status() != psutil.STATUS_ZOMBIE:
            return False
    print("the stages of a killed run are still stopping here; waiting for them", flush=True)
    return lock.acquire(STOPPING_SECONDS)
