"""System metrics of a stage, under the names of the System metrics tab of MLflow's UI. The sender samples them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

import psutil

GPU_QUERY = "index,utilization.gpu,memory.used,memory.total,power.draw"
GPU_SECONDS = 5.0


class SystemMetrics(threading.Thread):
    """Samples processor, memory, GPUs and the process `pid` every `seconds` (0: never) until stopped or the process has
    ended, and passes each sample with its number to `log`."""

    def __init__(self, log: Callable[[dict[str, float], int], None], pid: int, seconds: float) -> None:
        super().__init__(name="leash-system-metrics", daemon=True)
        self._log = log
        self._pid = pid
        self._seconds = seconds
        self._end = threading.Event()

    def stop(self) -> None:
        """Take no further sample; returns within a second."""
        self._end.set()
        self.join(timeout=1.0)

    def run(self) -> None:
        """Sample until stopped."""
        if self._seconds <= 0:
            return
        psutil.cpu_percent()  # the first call always returns 0
        step = 0
        with suppress(psutil.Error):  # the process has ended
            process = psutil.Process(self._pid)
            while not self._end.wait(self._seconds):
                self._log({f"system/{name}": round(value, 1) for name, value in sample(process).items()}, step)
                step += 1


def sample(process: psutil.Process) -> dict[str, float]:
    """Utilisation in percent, memory in megabytes, power in watts. Memory of the process includes its children, which
    share pages: it is an upper bound. Raises psutil.Error when the process has ended."""
    memory = psutil.virtual_memory()
    resident = process.memory_info().rss
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            resident += child.memory_info().rss
    return {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / 1e6,
        "system_memory_usage_percentage": memory.percent,
        "process_memory_megabytes": resident / 1e6,
        **gpus(),
    }


def gpus() -> dict[str, float]:
    """The figures of each GPU by nvidia-smi; empty where there is none, or where it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, float] = {}
    for line in done.stdout.splitlines():
        index, *words = (word.strip() for word in line.split(","))
        values = [_number(word) for word in words]
        if len(values) != 4:
            continue
        utilization, used, total, power = values
        share = 100 * used / total if used is not None and total else None
        named = {
            "utilization_percentage": utilization,
            "memory_usage_megabytes": used and used * 2**20 / 1e6,  # nvidia-smi counts in MiB
            "memory_usage_percentage": share,
            "power_usage_watts": power,
        }
        found |= {f"gpu_{index}_{name}": value for name, value in named.items() if value is not None}
    return found


def _number(text: str) -> float | None:
    """None for `[N/A]`, which nvidia-smi prints for what a GPU does not measure."""
    try:
        return float(text)
    except ValueError:
        return None
