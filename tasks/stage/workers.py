"""Several processes for one stage: the stage itself is rank 0, and it starts worker ranks that run the same module. A
worker computes its share only: it holds no lock, tracks nothing and writes no output. Where torchrun or `accelerate
launch` has started the ranks, nothing is started here."""

import atexit
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from rlhf_core.errors import UserError
from tasks.params.loader import read_yaml

PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process receives when its parent dies."""


def is_worker() -> bool:
    """Whether this process is a rank above 0."""
    return int(os.environ.get("RANK", "0")) > 0


def start_workers(module: str, count: int) -> None:
    """Make this process rank 0 of `count`, and start the others; they end with it."""
    if count < 2 or "RANK" in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="leash-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "LEASH_RENDEZVOUS": str(folder / "store")}
    for rank in range(1, count):
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        worker = subprocess.Popen([sys.executable, "-m", module], env=environment, stdout=subprocess.DEVNULL)
        atexit.register(_end, worker)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}


def run_as_worker() -> None:
    """For a worker: ignore signals that the stage handles, and end at once when the stage has ended, even by a kill."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def requested_processes(name: str) -> int:
    """`processes` of a stage in params.yaml; 1 where the file cannot be read, which `run` then reports."""
    with suppress(UserError):
        content = read_yaml()
        block = content.get(name) or {}
        settings = block.get("settings") or {} if name != "ppo" else {}
        if name != "ppo" and not block.get("enabled"):
            return 1
        count = ((content.get("ppo") or {}) | settings).get("processes", 1)
        return count if isinstance(count, int) else 1
    return 1


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """End a worker that still waits for a stage which has failed."""
    worker.kill()
    worker.wait()
