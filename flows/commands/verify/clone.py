"""A temporary clone of the project in `work/verify-…`, with its own DVC cache."""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.stages import Environment
from rlhf_core.errors import UserError
from rlhf_core.locks import FileLock, holder, is_held
from tasks.tracking.settings import HOLD_VARIABLE

PREFIX = "verify-"
OWNER = "owner.lock"
"""Locked by the process that made the clone; without a lock the clone is abandoned."""
KEPT = "kept"
"""Marks a clone made with `--keep`."""
PROJECT = "project"

CONFIG = """[core]
    analytics = false
    autostage = false
    site_cache_dir = {folder}/site
[cache]
    dir = {folder}/cache
"""


@contextmanager
def temporary_clone(root: Path, keep: bool) -> Iterator[Path]:
    """An empty project with git and DVC set up, below `root`/work; removed at the end unless `keep`."""
    (root / "work").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root / "work"))
    owner = FileLock(folder / OWNER)
    try:
        owner.acquire()
        if keep:
            (folder / KEPT).touch()
        project = folder / PROJECT
        (project / ".dvc").mkdir(parents=True)
        (project / ".dvc" / "config.local").write_text(CONFIG.format(folder=folder), encoding="utf-8")
        _git_init(project)
        yield project
    finally:
        if not keep:
            with _signals_ignored():
                shutil.rmtree(folder, ignore_errors=True)
        owner.release()


def clones(root: Path) -> Iterator[tuple[Path, int | None]]:
    """(folder, the process that works in it): its maker, or a stage that a killed maker has left; None where the clone
    is abandoned or was kept by `--keep`."""
    for folder in sorted((root / "work").glob(f"{PREFIX}*")):
        locks = [folder / OWNER, *sorted((folder / PROJECT / "work").glob("*.lock"))]
        held = next((lock for lock in locks if is_held(lock)), None)
        yield folder, (holder(held) or 0) if held else None


def environment(project: Path) -> Environment:
    """Variables with which a stage runs the clone's code, sends nothing to MLflow, and uses the clone's git repository
    also when a git hook has started this process."""
    path = os.pathsep.join([str(project), *filter(None, [os.environ.get("PYTHONPATH")])])
    git = {name: None for name in os.environ if name.startswith("GIT_") and name not in {"GIT_SSH", "GIT_SSH_COMMAND"}}
    database = f"sqlite:///{project / 'mlflow.db'}"
    ours = {"PYTHONPATH": path, "PYTHONSAFEPATH": None, "MLFLOW_TRACKING_URI": database, HOLD_VARIABLE: "1"}
    return {**git, **ours}


def _git_init(project: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "init", "--quiet", "--template="]
    done = subprocess.run(command, cwd=project, env=kept, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"git init failed ({done.stderr.strip()}); install git")


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore signals in the block: a second Ctrl-C must not interrupt the removal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
