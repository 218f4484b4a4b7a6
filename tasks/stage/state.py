"""The state folder of a stage, `work/<stage>/<key>/`: its lock, and when it is removed.

DVC may be killed, or fill the disk, while it stores the outputs of a finished stage, and would then start the stage
again. So the state of a stage that DVC runs is only marked as finished. The next stage removes it when `dvc.lock` has
the record.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.errors import UserError
from rlhf_core.locks import FileLock, holder
from tasks.stage.dvc_files import Definition
from tasks.stage.workers import is_worker

FINISHED = "finished"


@contextmanager
def locked(root: Path, name: str) -> Iterator[None]:
    """Hold the lock of a stage: two processes would write the same outputs. Worker ranks need none. Raises UserError
    when another process holds it, perhaps one that a killed dvc has left."""
    path = lock_file(root, name)
    path.parent.mkdir(exist_ok=True)
    lock = FileLock(path)
    if not is_worker() and not lock.acquire(timeout=1.0):
        raise UserError(
            f"another process ({holder(path)}) runs this stage here, perhaps left by a dvc that was killed; wait for "
            f"it, or stop it with `kill {holder(path)}` (it saves what it has done), then run this again"
        )
    try:
        yield
    finally:
        lock.release()


def lock_file(root: Path, name: str) -> Path:
    """The lock of the process of a stage."""
    return root / "work" / f"{name}.lock"


def begin(definition: Definition, key: str) -> Path:
    """The state folder. Removes the recorded state of every stage: a stage that runs again although DVC has its results
    starts from the beginning."""
    work = definition.project.root / "work"
    for stage in definition.project.stages if not is_worker() else ():
        if not any((work / stage.name).glob(f"*/{FINISHED}")) or (recorded := stage.recorded_key()) is None:
            continue
        done, lock = work / stage.name / recorded[:16], FileLock(lock_file(work.parent, stage.name))
        if (done / FINISHED).exists() and (stage.name == definition.name or lock.acquire()):
            shutil.rmtree(done, ignore_errors=True)
            lock.release()
    folder = work / definition.name / key[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def end(folder: Path, recorded_later: bool) -> None:
    """When the outputs are in place: mark the state if DVC has to record them, else remove it."""
    if recorded_later and any(folder.iterdir()):
        (folder / FINISHED).touch()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def under_dvc(name: str) -> bool:
    """Whether DVC runs this stage and will record it: it sets DVC_STAGE for its commands."""
    return os.environ.get("DVC_STAGE", "").rpartition(":")[2] == name
