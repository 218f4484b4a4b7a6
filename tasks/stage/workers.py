"""Several processes for one stage: the stage itself is the first, and it starts companions that run the same module and
follow it. A companion computes its share and nothing else: it holds no lock, tracks nothing, and writes no output.

`accelerate launch -m tasks.ppo` makes the same arrangement from outside; then nothing is started here.
"""

import atexit
import ctypes
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from rlhf_core.errors import UserError
from tasks.params.loader import read_yaml

PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent dies."""


def is_worker() -> bool:
    """Whether this process follows another one."""
    return int(os.environ.get("RANK", "0")) > 0


def start_workers(module: str, count: int) -> None:
    """Make this process the first of `count`, and start the others; they end with it."""
    if count < 2 or "RANK" in os.environ:
        return
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    for rank in range(count - 1, -1, -1):
        environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if rank == 0:
            os.environ.update(environment)
        else:
            worker = subprocess.Popen([sys.executable, "-m", module], env=environment, stdout=subprocess.DEVNULL)
            atexit.register(_end, worker)


def run_as_worker() -> None:
    """For a companion: leave it to the stage when to stop, and end at once when that is gone, however it went."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def requested_processes(name: str) -> int:
    """How many processes params.yaml asks for; 1 where it cannot be read, which `run` then says in its own words."""
    with suppress(UserError):
        content = read_yaml()
        block = content.get(name) or {}
        settings = block.get("settings") or {} if name != "ppo" else {}
        if name != "ppo" and not block.get("enabled"):
            return 1
        asked = ((content.get("ppo") or {}) | settings).get("processes", 1)
        return asked if isinstance(asked, int) else 1
    return 1


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """A companion that has done its share is gone already; one that waits for a stage which has failed is not."""
    worker.kill()
    worker.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
