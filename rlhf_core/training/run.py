"""Where a training keeps its state, and what may stop it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlhf_core.config.precision import Precision
from rlhf_core.training.checkpoints import Log
from rlhf_core.training.processes import Processes

Report = Callable[[int, int, dict[str, float]], None]
"""Called after each step with (steps done, steps in all, values)."""


class Stopping(Protocol):
    """Whether this process was requested to stop."""

    def deferred(self) -> AbstractContextManager[None]:
        """In this context a request to stop changes only `is_requested`."""

    def is_requested(self) -> bool:
        """True after a request to stop."""


class NeverStops:
    """For a run that a signal ends at any point."""

    def deferred(self) -> AbstractContextManager[None]:
        """Changes nothing."""
        return nullcontext()

    def is_requested(self) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class Run:
    """Where a training keeps its resumable state, and settings that cannot change its result."""

    state_dir: Path
    seed: int
    report: Report
    checkpoint_every: int = 100
    stopping: Stopping = NeverStops()  # noqa: RUF009 - it has no state
    """Read after each step; after a request to stop, a checkpoint is written and KeyboardInterrupt raised."""
    log: Log = print
    precision: Precision = "float32"
    """Of matrix products; weights and losses are float32 in every precision."""
    processes: Processes | None = None
    """The processes over which the model is divided while it is trained; None: it is whole."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files, and has the whole model in the end."""
        return self.processes is None or self.processes.is_main
