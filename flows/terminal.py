"""What the command line prints of a run: a live line per stage on a terminal, plain lines elsewhere, and the closing
table. A served flow does not open the screen, because Prefect's console log prints there."""

import re
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flows.stages import EXECUTED, FAILED, NOT_RUN, RESTORED, UP_TO_DATE, Outcome
from flows.text import table
from tasks.stage.progress import duration, is_progress

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

WORDS = {EXECUTED: "ran", UP_TO_DATE: "up to date", RESTORED: "restored", FAILED: "FAILED", NOT_RUN: "not run"}
_HIDDEN = (
    "To track the changes with git", "\tgit add", "To enable auto staging", "\tdvc config core.autostage",
    "Use `dvc push`", "Data and pipelines are up to date", "Generating lock file", "Updating lock file",
    "Running stage '", "Verifying data sources", "Stage '", "> ", "ERROR: failed to reproduce '", "ERROR: interrupted",
    "Pulling data for ", "Unable to pull data for ", "WARNING: Some of the cache files do not exist", "md5: ", "name: ",
    "Is your cache up to date?", "<https://error.dvc.org/",
)  # fmt: skip
"""Beginnings of lines that DVC prints around every stage: advice, and what our own lines, errors and the table show."""
_LABEL = re.compile(r"^\[\d+/\d+ [^\]]+\] ")
"""A stage's own label; its numbers are places in dvc.yaml, not in the run."""


@dataclass
class _Screen:
    lock: Any = field(default_factory=threading.RLock)
    open: bool = False
    began: float = field(default_factory=time.monotonic)
    live: "Live | None" = None
    places: dict[str, str] = field(default_factory=dict)
    off: list[str] = field(default_factory=list)
    """The stages that are switched off: they write empty outputs, and are not shown."""
    running: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Stage -> when it began, and its last progress line."""
    ended: dict[str, Outcome] = field(default_factory=dict)

    def write(self, stage: str, text: str) -> None:
        """Print a line with the stage's label, above the live lines."""
        line = f"[{self.places.get(stage, '')}{stage}] {text}" if stage else text
        if self.live:
            self.live.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def live_lines(self) -> "Group":
        """A line for each running stage (its name, its last progress line, the time since it began), one for all."""
        from rich.console import Group
        from rich.text import Text

        now = time.monotonic()
        lines = [  # without the lock: rich holds one of its own here
            f"[{self.places.get(stage, '')}{stage}] {f'{last}  ' if last else ''}({duration(now - began)})"
            for stage, (began, last) in list(self.running.items())
        ]
        done = sum(stage in self.ended for stage in self.places)
        lines.append(f"{done} of {len(self.places)} stages done ({duration(now - self.began)})")
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))


_screen = _Screen()


@contextmanager
def screen(stages: Sequence[str] = (), off: Collection[str] = ()) -> Iterator[None]:
    """Within the block, `print_line` prints to stdout; `stages` are those of the run, in their order. On a terminal
    they have live lines. Those in `off` are not shown."""
    global _screen
    counted = [stage for stage in stages if stage not in off]
    places = {stage: f"{place}/{len(counted)} " for place, stage in enumerate(counted, start=1)}
    _screen = _Screen(open=True, places=places, off=[stage for stage in stages if stage in off])
    try:
        if stages and sys.stdout.isatty():
            from rich.live import Live

            with Live(get_renderable=_screen.live_lines, refresh_per_second=2, transient=True) as _screen.live:
                yield
        else:
            yield
    finally:
        _screen.open, _screen.live = False, None


def print_line(stage: str, line: str) -> None:
    """Print one line of a stage, or of the run. On a terminal a progress line replaces the one before."""
    if not _screen.open or not is_shown(line) or stage in _screen.off:
        return
    with _screen.lock:
        text = _LABEL.sub("", line)
        if stage and stage not in _screen.ended:
            began, last = _screen.running.get(stage, (time.monotonic(), ""))
            _screen.running[stage] = began, text if is_progress(line) else last
        if not (_screen.live and is_progress(line)):
            _screen.write(stage, text)


def end(outcome: Outcome) -> None:
    """Remove the live line of a stage that has ended, and add it to the closing table."""
    with _screen.lock:
        _screen.running.pop(outcome.stage, None)
        _screen.ended[outcome.stage] = outcome
        hidden = outcome.stage in _screen.off and outcome.state != FAILED
        if _screen.open and not hidden and outcome.state in {EXECUTED, RESTORED, FAILED}:
            took = f" in {duration(outcome.seconds)}" if outcome.seconds else ""
            _screen.write(outcome.stage, f"{WORDS[outcome.state]}{took}")


def closing_table() -> str:
    """The outcomes of the stages that have ended since the screen was opened, how many there are of each, and which
    stages are switched off."""
    order = [*_screen.places, *_screen.off]
    ended = sorted(_screen.ended.values(), key=lambda one: order.index(one.stage))
    shown = [one for one in ended if one.stage not in _screen.off or one.state == FAILED]
    counts = []
    for state, word in WORDS.items():
        seconds = [one.seconds for one in shown if one.state == state]
        if seconds:
            counts.append(f"{len(seconds)} {word}" + (f" in {duration(sum(seconds))}" if any(seconds) else ""))
    in_all = [f"in all: {', '.join(counts)}"] if counts else []
    return "\n".join([outcome_table(shown), *in_all, *switched_off_line(_screen.off)])


def switched_off_line(stages: Sequence[str]) -> list[str]:
    """The line about the stages that are switched off; none where there are none."""
    return [f"switched off in params.yaml: {', '.join(stages)}"] if stages else []


def is_shown(line: str) -> bool:
    """Whether a line is printed: it is neither blank nor one of DVC's `_HIDDEN`."""
    return bool(line.strip()) and not line.startswith(_HIDDEN)


def outcome_table(outcomes: Iterable[Outcome]) -> str:
    """Stage, outcome and seconds."""
    rows = []
    for one in outcomes:
        attempts = f" (attempt {one.attempts})" if one.attempts > 1 else ""
        rows.append((one.stage, f"{WORDS[one.state]}{attempts}", f"{one.seconds:.1f}" if one.seconds else ""))
    return table([("stage", "outcome", "seconds"), *rows])


def print_error(message: str) -> None:
    """One line on stderr, or several where the message has a list of problems."""
    lines = [" ".join(part.split()) for part in message.split(";\n")]
    print("error: " + "\n  ".join(lines), file=sys.stderr, flush=True)


def stopped() -> str:
    """What an interrupted command prints at its end."""
    running = [stage for stage in _screen.places if stage in _screen.running]
    rest = f"; the same command continues with {', '.join(running)}" if running else ""
    return f"stopped; nothing is left running{rest}"
