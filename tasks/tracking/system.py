"""System metrics of a stage, under the names of the System metrics tab of MLflow's UI."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SystemMetrics(threading.Thread):
    """Samples processor and memory every `seconds` and once at the end, and passes each sample to `log`."""

    def __init__(self, log: Callable[[dict[str, float], int], None], seconds: float) -> None:
        super().__init__(name="leash-system-metrics", daemon=True)
        self._log = log
        self._seconds = seconds
        self._end = threading.Event()

    def stop(self) -> None:
        """Take the last sample; returns within a second."""
        self._end.set()
        self.join(timeout=1.0)

    def run(self) -> None:
        """Sample until stopped; `step` counts the samples of this process."""
        import psutil

        process = psutil.Process()
        psutil.cpu_percent()  # the first call always returns 0
        step, ended = 0, False
        while not ended:
            ended = self._end.wait(self._seconds)
            memory = psutil.virtual_memory()
            sample = {
                "system/cpu_utilization_percentage": psutil.cpu_percent(),
                "system/system_memory_usage_megabytes": memory.used / 1e6,
                "system/system_memory_usage_percentage": memory.percent,
                "system/process_memory_megabytes": process.memory_info().rss / 1e6,
            }
            self._log({key: round(value, 1) for key, value in sample.items()}, step)
            step += 1
