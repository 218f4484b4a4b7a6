"""Out of memory: a failed pass is freed, and the batches of its phase are halved for the rest of the run."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from rlhf_core import files
from rlhf_core.errors import UserError, is_out_of_memory

Result = TypeVar("Result")
Log = Callable[[str], None]
Gather = Callable[[list[int]], list[int]]
"""Concatenates the lists of all processes."""

EXEMPT = "; the result is the same up to rounding, and this run is exempt from byte identity"


class OutOfMemory(Exception):
    """A pass over `rows` rows did not fit."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows


def attempt(work: Callable[[], Result], rows: Callable[[], int]) -> Result:
    """`work()`, a pass over `rows()` rows. Raises OutOfMemory in place of the allocator's error.

    The new error is raised outside the handler: a chained one would keep the activations of the failed pass alive.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    raise OutOfMemory(rows())


def free() -> None:
    """Free the memory of a failed pass."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class Halving:
    """Whether the batches of a phase are halved: from the first pass that does not fit to the end of the run. The
    gradient is equal up to rounding, so such a run is exempt from byte identity.

    Args:
        phase: its name in messages.
        keys: the parameters to lower where even halves do not fit.
        warn: called with a message at the halving, and again in a process that continues the run.
        marker: a file that records the halving where no checkpoint does.
    """

    phase: str
    keys: str
    warn: Log
    marker: Path | None = None
    done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.marker is not None and self.marker.exists():
            self.load_state_dict({"done": True})

    def of(self, rows: int) -> int:
        """The rows of a batch that is planned with `rows`."""
        return max(1, -(-rows // 2)) if self.done else rows

    def halve(self, rows: int) -> None:
        """A pass over `rows` rows did not fit. Raises UserError when it was halved already, or is a single row."""
        if self.done or rows < 2:
            size = "a single row" if rows < 2 else f"halved batches of {rows} rows"
            raise UserError(
                f"out of memory in {self.phase} with {size}; lower {self.keys}; the last checkpoint is kept"
            )
        free()
        self.done = True
        if self.marker is not None:
            self.marker.parent.mkdir(parents=True, exist_ok=True)
            self.marker.touch()  # all processes do so at the same time
            files.flush_entry(self.marker)
        self.warn(f"out of memory in {self.phase} with {rows} rows at once: half as many from here on{EXEMPT}")

    def until_it_fits(
        self,
        work: Callable[[], Result],
        undo: Callable[[], None] = lambda: None,
        gather: Gather = list,
    ) -> Result:
        """`work()`; where it raises OutOfMemory in any process, all processes call `undo()`, halve and repeat it.
        Raises UserError the second time."""
        while True:
            failed = []
            try:
                result = work()
            except OutOfMemory as error:
                failed = [error.rows]
            failed = gather(failed)
            if not failed:
                return result
            undo()
            self.halve(min(failed))

    def in_pieces(
        self,
        items: Sequence[int],
        rows: int,
        work: Callable[[list[int]], Sequence[Result]],
        gather: Gather = list,
    ) -> list[Result]:
        """`work` on all items, one result each; it splits them into batches of `rows` itself. Once halved, it receives
        half of `rows` at a time."""

        def pieces() -> list[Result]:
            size = self.of(min(rows, len(items))) if self.done else max(1, len(items))
            done: list[Result] = []
            for start in range(0, max(1, len(items)), size):
                part = list(items[start : start + size])
                done += attempt(partial(work, part), lambda: min(rows, size))
            return done

        return self.until_it_fits(pieces, gather=gather)

    def state_dict(self) -> dict[str, bool]:
        """For a checkpoint."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """Continue the run that wrote it, and repeat the message of its halving."""
        self.done = state["done"]
        if self.done:
            self.warn(f"out of memory in {self.phase} earlier in this run: half the rows at once{EXEMPT}")
