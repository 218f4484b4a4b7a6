"""Progress of a loop: the stage, the step of how many, the numbers that matter, the time left.

On a terminal one line is rewritten; elsewhere a line is printed every few seconds.
"""

import sys
import time
from collections.abc import Mapping


class Progress:
    """The progress of one loop of a stage."""

    def __init__(self, label: str, total: int, unit: str, seconds: float) -> None:
        self.label, self.total, self.unit, self.seconds = label, total, unit, seconds
        self.started = self.last_print = time.monotonic()
        self.first_step: int | None = None
        self.terminal = sys.stdout.isatty()

    def update(self, step: int, **values: float | None) -> None:
        """`step` of the loop is done; `values` are shown beside it."""
        now = time.monotonic()
        if self.first_step is None:
            self.first_step = step - 1
        due = now - self.last_print >= (0.1 if self.terminal else self.seconds)
        if due or step >= self.total:
            self.last_print = now
            self._print(self._line(step, values, now), final=step >= self.total)

    def note(self, text: str) -> None:
        """One line that stays, in the middle of the loop."""
        self._print(f"{self.label} {text}", final=True)

    def _line(self, step: int, values: Mapping[str, float | None], now: float) -> str:
        shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)
        done = step - (self.first_step or 0)
        left = (now - self.started) / max(1, done) * (self.total - step)
        rest = f"{_duration(left)} left" if step < self.total else f"done in {_duration(now - self.started)}"
        return f"{self.label} {self.unit} {step}/{self.total}  {shown}  {rest}"

    def _print(self, line: str, final: bool) -> None:
        if self.terminal:
            sys.stdout.write(f"\r\033[K{line}" + ("\n" if final else ""))
        else:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
