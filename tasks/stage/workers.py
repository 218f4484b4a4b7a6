"""The processes of one stage. The stage is rank 0 and starts worker ranks that run the same module and compute
their share: they hold no lock, track nothing and write no output. Ranks that torchrun or `accelerate launch` has
started are left as they are."""

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
from tasks.params.loader import PARAMS_FILE, is_switched_off, read_yaml
from tasks.params.methods import VARIANTS

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


def requested_processes(stage: str, path: Path = PARAMS_FILE) -> int:
    """`processes` of a stage that is switched on, in the file at `path`; of a variant of PPO those of `ppo` unless its
    settings say otherwise. 1 where the file is not valid, which the stage itself reports."""
    with suppress(UserError, AttributeError, KeyError, TypeError):
        content = read_yaml(path)
        if is_switched_off(content, stage):
            return 1
        settings = content[stage]
        if stage in VARIANTS:
            settings = content["ppo"] | (settings.get("settings") or {})
        count = settings.get("processes", 1)
        return count if isinstance(count, int) else 1
    return 1


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """Kill a worker that still waits for a stage which has failed."""
    worker.kill()
    worker.wait()
