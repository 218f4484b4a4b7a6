"""What a person at a terminal reads: live lines with the stage's name, and the closing table. The flow calls `say`; it
is silent until the command line has opened it, because a served flow has Prefect's own console log."""

import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from flows.stages import EXECUTED, FAILED, NOT_RUN, RESTORED, UP_TO_DATE, Outcome

WORDS = {
    EXECUTED: "ran",
    UP_TO_DATE: "UpToDate",
    RESTORED: "Restored",
    FAILED: "FAILED",
    NOT_RUN: "not run",
}
_CHATTER = (
    "To track the changes with git", "\tgit add", "To enable auto staging", "\tdvc config core.autostage",
    "Use `dvc push`", "Data and pipelines are up to date", "Generating lock file", "Updating lock file",
    "Running stage '", "Verifying data sources",
)  # fmt: skip
"""Advice that DVC gives after every stage, and what the table says at the end anyhow."""


@dataclass
class _Screen:
    lock: threading.Lock = field(default_factory=threading.Lock)
    open: bool = False


_screen = _Screen()


def open_screen() -> None:
    """From now on `say` writes to stdout."""
    _screen.open = True


def say(stage: str, line: str) -> None:
    """One live line of a stage: `sft           | step 20/300 …`. Blank lines and DVC's advice are left out."""
    if _screen.open and worth_saying(line):
        with _screen.lock:
            print(f"{stage:<13} | {line}" if stage else line, flush=True)


def worth_saying(line: str) -> bool:
    """Whether a line tells a person anything."""
    return bool(line.strip()) and not line.startswith(_CHATTER)


def table(rows: Iterable[Iterable[str]]) -> str:
    """Left-aligned columns, the first row being the heading."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def outcome_table(outcomes: Iterable[Outcome]) -> str:
    """Stage, outcome and seconds of a run."""
    rows = [(one.stage, WORDS[one.state], f"{one.seconds:.1f}" if one.seconds else "") for one in outcomes]
    return table([("stage", "outcome", "seconds"), *rows])


def complain(message: str) -> None:
    """One line on stderr."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
