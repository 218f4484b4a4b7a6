"""The GPUs of a stage: as many as it has processes, each locked against the other stages of this machine, of whatever
workspace and user. Tested with invented GPUs only."""

import os
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from rlhf_core.locks import FileLock, who_holds

LOCKS_VARIABLE = "LEASH_GPU_LOCKS"
"""Environment variable: the folder of the locks, where it is not `LOCKS`."""
LOCKS = Path("/tmp/leash-gpus")  # not tempfile's: all users of the machine need the same
WITHOUT_GPU = ("check", "check_data", "ingest", "report")
POLL_SECONDS = 0.5
QUERY_SECONDS = 30.0

_held: list[FileLock] = []
"""Until this process ends."""


def claim_gpus(count: int) -> None:
    """Take `count` of the visible GPUs, or all where there are fewer, wait until they are free, and set
    CUDA_VISIBLE_DEVICES.

    Call it before torch is imported. It changes nothing without a GPU, and in ranks that a launcher or the stage
    started.
    """
    names = visible_gpus()
    if not names or "RANK" in os.environ:
        return
    count = min(len(names), max(1, count))
    chosen = names[:count]
    try:
        chosen = _lock(names, count)
    except OSError as error:
        print(f"GPUs are not locked ({error}): another stage may use the same one at the same time", flush=True)
    if len(names) > count:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)


def _lock(names: Sequence[str], count: int) -> list[str]:
    """Lock `count` of the GPUs; their names. While too few are free it holds none, so that two waiting stages cannot
    block each other. Raises OSError."""
    files, printed = _lock_files(names), ""
    while True:
        taken = [(name, lock) for name, path in files.items() if (lock := FileLock(path, shared=True)).acquire()]
        kept = taken[:count] if len(taken) >= count else []
        for _, lock in taken[len(kept) :]:
            lock.release()
        if kept:
            _held.extend(lock for _, lock in kept)
            return [name for name, _ in kept]
        busy = "; ".join(f"GPU {name}: {who}" for name, path in files.items() if (who := who_holds(path)))
        if busy and busy != printed:
            print(f"waits for {count} free GPU{'s' * (count > 1)} ({busy})", flush=True)
            printed = busy
        time.sleep(POLL_SECONDS)


def locked_gpus() -> Iterator[tuple[str, str]]:
    """(name, who uses it) of each visible GPU; the second is empty for a free one. Raises OSError."""
    for name, path in _lock_files(visible_gpus()).items():
        yield name, who_holds(path)


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """The names of the GPUs that CUDA would use: those in CUDA_VISIBLE_DEVICES up to the first that is not valid, or
    where it is not set the numbers of NVIDIA's device files in `devices`, counted from 0 as CUDA does."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(number) for number, _ in enumerate(devices.glob("nvidia[0-9]*"))]
    return list(takewhile(lambda name: name and not name.startswith("-"), map(str.strip, named.split(","))))


def _lock_files(names: Sequence[str]) -> dict[str, Path]:
    """The lock file of each GPU, named after its UUID where the driver's tool gives it. Raises OSError."""
    if not names:
        return {}
    folder = Path(os.environ.get(LOCKS_VARIABLE) or LOCKS)
    with suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(0o1777)
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise NotADirectoryError(f"{folder} is not a folder; remove it")
    printed = ""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]  # in the order of the bus
        printed = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True).stdout
    uuids = dict(line.split(", ", 1) for line in printed.splitlines() if ", " in line)
    return {name: folder / f"{uuids.get(name, name)}.lock" for name in names}
