"""The progress of a loop: stage, step, metrics, time left. On a terminal one line is rewritten; elsewhere a line is
printed every few seconds."""

import re
import sys
import time
from collections.abc import Mapping

_LINE = re.compile(r"^\[[^\]]+\] (?:[^\d\s]\S* )+\d+/\d+(?:  |$)")
BASIS_UPDATES = 3
BASIS_SECONDS = 5.0
"""There is no estimate before this many updates or seconds."""


class Progress:
    """The progress of one loop of a stage."""

    def __init__(self, label: str, total: int, unit: str, seconds: float) -> None:
        self.label, self.total, self.unit, self.seconds = label, total, unit, seconds
        self.started = self.last_print = time.monotonic()
        self.first: tuple[int, float] | None = None
        self.updates = 0
        self.terminal = sys.stdout.isatty()

    def update(self, step: int, **values: float | None) -> None:
        """Report that `step` of the loop is done, with `values`."""
        now = time.monotonic()
        self.first = self.first or (step, now)
        self.updates += 1
        due = now - self.last_print >= (0.1 if self.terminal else self.seconds)
        if due or step >= self.total:
            self.last_print = now
            self._print(self._line(step, values, now), final=step >= self.total)

    def note(self, text: str) -> None:
        """Print a line that the next progress line does not replace."""
        self._print(f"{self.label} {text}", final=True)

    def _line(self, step: int, values: Mapping[str, float | None], now: float) -> str:
        numbers = [f"{name} {value:.4g}" for name, value in values.items() if value is not None]
        rest = self._left(step, now) if step < self.total else f"done in {duration(now - self.started)}"
        return "  ".join(filter(None, [f"{self.label} {self.unit} {step}/{self.total}", *numbers, rest]))

    def _left(self, step: int, now: float) -> str:
        """The time left at the speed since the first update; its own time may include a slow start."""
        first_step, first_time = self.first or (step, now)
        if step <= first_step or (self.updates <= BASIS_UPDATES and now - first_time < BASIS_SECONDS):
            return ""
        return f"{duration((now - first_time) / (step - first_step) * (self.total - step))} left"

    def _print(self, line: str, final: bool) -> None:
        if self.terminal:
            sys.stdout.write(f"\r\033[K{line}" + ("\n" if final else ""))
        else:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()


def is_progress(line: str) -> bool:
    """Whether a stage's line is one of `Progress` that the next one replaces."""
    return bool(_LINE.match(line)) and "  done in " not in line


def duration(seconds: float) -> str:
    """`4 s`, `2 min 05 s`, `1 h 20 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
