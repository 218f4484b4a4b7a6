"""The processes of one stage. The stage is rank 0 and starts worker ranks that run the same stage and compute their
share: they hold no lock, track nothing and write no output. Ranks that torchrun or `accelerate launch` has
started are left as they are."""

import atexit
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core import files
from tasks.params.methods import VARIANTS

RENDEZVOUS = "LEASH_RENDEZVOUS"
"""The environment variable of `rlhf_core.training.processes`, which imports torch."""
PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process receives when its parent dies."""
SECONDS_FOR_MESSAGE = 3.0
"""How long a rank that has lost the others waits for the message of the one that failed first."""
SECONDS_TO_END = 30.0
"""How long rank 0 may go on after a worker has failed, before it counts as hanging."""
_ending = threading.Event()
"""Set when rank 0 ends by itself."""

Failure = tuple[int, str]
"""Exit code and message."""


def is_worker() -> bool:
    """Whether this process is a rank above 0."""
    return int(os.environ.get("RANK", "0")) > 0


def start_workers(stage: str, count: int) -> None:
    """Make this process rank 0 of `count`, and start the others; they end with it."""
    if count < 2 or "RANK" in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="leash-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), RENDEZVOUS: str(folder / "store")}
    workers = []
    for rank in range(1, count):
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        worker = subprocess.Popen([sys.executable, "-m", "tasks", stage], env=environment, stdout=subprocess.DEVNULL)
        atexit.register(_end, worker)
        workers.append(worker)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    threading.Thread(target=_watch, args=(workers, stage, folder), daemon=True).start()


def end_watch() -> None:
    """From here on this process ends by itself."""
    _ending.set()


def report_failure(code: int, message: str) -> None:
    """For a worker that `start_workers` has started: leave its error where the other ranks find it."""
    if (folder := _folder()) is not None:
        with suppress(OSError), files.atomic(folder / f"failure-{os.environ['RANK']}.json") as place:
            place.write_text(json.dumps([code, message]), encoding="utf-8")


def failure_of_worker(seconds: float = SECONDS_FOR_MESSAGE) -> Failure | None:
    """The error of a worker that is not a crash, None where there is none within `seconds`, or no worker that
    `start_workers` has started."""
    folder, end = _folder(), time.monotonic() + seconds
    while folder is not None:
        if (found := _reported(folder)) is not None or time.monotonic() > end:
            return found
        time.sleep(0.05)
    return None


def run_as_worker() -> None:
    """For a worker: ignore signals that the stage handles, and end at once when the stage has ended, even by a kill."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def requested_processes(content: dict[str, Any], stage: str) -> int:
    """`processes` of a stage in the content of params.yaml; of a variant of PPO those of `ppo` unless its settings say
    otherwise. 1 where the content is not valid, which the stage itself reports."""
    with suppress(AttributeError, KeyError, TypeError):
        settings = content[stage]
        if stage in VARIANTS:
            settings = content["ppo"] | (settings.get("settings") or {})
        count = settings.get("processes", 1)
        return count if isinstance(count, int) else 1
    return 1


def _folder() -> Path | None:
    return Path(os.environ[RENDEZVOUS]).parent if RENDEZVOUS in os.environ else None


def _reported(folder: Path) -> Failure | None:
    """The error of a user, not a crash of a rank that has only lost the others."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("failure-*.json"))]
    return next(((code, message) for code, message in found if code != 1), None)


def _watch(workers: "Sequence[subprocess.Popen[bytes]]", stage: str, folder: Path) -> None:
    """End this process when it still runs `SECONDS_TO_END` after a worker has failed: it waits for that worker."""
    while not any(worker.poll() for worker in workers):
        if _ending.wait(0.5):
            return
    if _ending.wait(SECONDS_TO_END):
        return
    code, message = _reported(folder) or (1, _loss(workers))
    print(f"{stage}: {message}", file=sys.stderr, flush=True)
    for worker in workers:
        worker.kill()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def _loss(workers: "Sequence[subprocess.Popen[bytes]]") -> str:
    rank, code = next((rank, worker.returncode) for rank, worker in enumerate(workers, 1) if worker.returncode)
    end = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the process of rank {rank} {end}; run the stage again, it continues from the last checkpoint"


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """Kill a worker that still waits for a stage which has failed."""
    worker.kill()
    worker.wait()
