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
from tasks.tracking.settings import OUTCOME_VARIABLE

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


def requested_processes(content: dict[str, Any], stage: str) -> int:
    """`processes` of a stage in the content of params.yaml; of a variant of PPO those of `ppo` unless its settings say
    otherwise. 1 where the stage does not train, and where the content is not valid, which the stage itself reports."""
    with suppress(AttributeError, KeyError, TypeError):
        settings = content[stage]
        if stage in VARIANTS:
            settings = content["ppo"] | (settings.get("settings") or {})
        count = 1 if settings.get("enabled") is False else settings.get("processes", 1)
        return count if isinstance(count, int) else 1
    return 1


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
        atexit.register(worker.wait)
        atexit.register(worker.kill)  # before the wait
        workers.append(worker)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    threading.Thread(target=_watch, args=(workers, stage, folder), daemon=True).start()


def run_as_worker() -> None:
    """For a worker: ignore signals that the stage handles, and end at once when the stage has ended, even by a kill."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def report_failure(code: int, message: str) -> None:
    """For a worker that `start_workers` has started: leave its error, unless it is a crash, for rank 0."""
    if code != 1 and RENDEZVOUS in os.environ:
        place = Path(os.environ[RENDEZVOUS]).with_name(f"failure-{os.environ['RANK']}.json")
        with suppress(OSError), files.atomic(place) as partial:
            partial.write_text(json.dumps([code, message]), encoding="utf-8")


def failure_of_worker() -> Failure | None:
    """The error that a worker has reported, or reports within `SECONDS_FOR_MESSAGE`; None where there is none."""
    end = time.monotonic() + SECONDS_FOR_MESSAGE
    while RENDEZVOUS in os.environ:
        if (found := _reported(Path(os.environ[RENDEZVOUS]).parent)) or time.monotonic() > end:
            return found
        time.sleep(0.05)
    return None


def end_watch() -> None:
    """From here on this process ends by itself."""
    _ending.set()


def _reported(folder: Path) -> Failure | None:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("failure-*.json"))]
    return (found[0][0], found[0][1]) if found else None


def write_outcome(stage: str, code: int, message: str, key: str = "") -> None:
    """Tell the driver, where there is one, how the stage ended."""
    if path := os.environ.get(OUTCOME_VARIABLE):
        outcome = {"stage": stage, "exit": code, "message": message, "key": key}
        with suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome, ensure_ascii=False) + "\n")


def _watch(workers: "Sequence[subprocess.Popen[bytes]]", stage: str, folder: Path) -> None:
    """End this process when it still runs `SECONDS_TO_END` after a worker has failed: it waits for that worker."""
    while not (failed := [(rank, worker.returncode) for rank, worker in enumerate(workers, 1) if worker.poll()]):
        if _ending.wait(0.5):
            return
    if _ending.wait(SECONDS_TO_END):
        return
    rank, status = failed[0]
    end = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
    loss = f"the process of rank {rank} {end}; run the stage again, it continues from the last checkpoint"
    code, message = _reported(folder) or (1, loss)
    print(f"{stage}: {message}", file=sys.stderr, flush=True)
    for worker in workers:
        worker.kill()
    shutil.rmtree(folder, ignore_errors=True)
    write_outcome(stage, code, message)
    os._exit(code)
