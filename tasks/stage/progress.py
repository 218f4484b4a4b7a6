"""The progress of a stage: its loop, what is done inside one round of it, metrics, time left. On a terminal one line is
rewritten; elsewhere a line is printed every few seconds."""

import re
import sys
import time
from collections.abc import Callable, Mapping

_LINE = re.compile(r"^\[[^\]]+\] (?:(?:[^\d\s]\S* )+\d+/\d+(?:  |$)|loading \S+$)")
BASIS_UPDATES = 3
BASIS_SECONDS = 5.0
"""There is no estimate before this many updates or seconds."""
SLOW, SAMPLED_SECONDS = 100, 10.0
"""Tokens a second below which a sampler is called slow, and the seconds over which that is measured."""


class Progress:
    """The progress of one loop of a stage.

    Args:
        label: the beginning of every line.
        total: rounds of the loop.
        unit: what a round is called.
        seconds: between two lines where stdout is no terminal.
        done: rounds that an earlier process has done.
        reads: rows that models read beside the rounds, such as the answers that are scored; the time left counts them
            at their own speed. 0: they are part of the rounds.
    """

    def __init__(self, label: str, total: int, unit: str, seconds: float, done: int = 0, reads: int = 0) -> None:
        self.label, self.total, self.unit, self.seconds, self.done = label, total, unit, seconds, done
        self.reads, self.rows_read, self.reading_seconds = reads, 0.0, 0.0
        self.started = self.last_print = self.last_update = self.last_report = time.monotonic()
        self.reading: tuple[float, int] | None = None
        """Rows done and in all of the reading that goes on; None during other work."""
        self.start: tuple[float, float] | None = None
        """Position and time from which the speed is measured, without the seconds of reading where `reads` counts it:
        of the first report, and from the second round on of the end of the first, which may be slow."""
        self.updates = 0
        self.estimated: tuple[float, float] | None = None
        """Seconds left and the time of this estimate, where the loop made it."""
        self.values: Mapping[str, float | None] = {}
        self.terminal = sys.stdout.isatty()

    def update(self, step: int, left: float | None = None, **values: float | None) -> None:
        """Report that `step` rounds are done, with `values`. `left`: the seconds left, where the loop has a better
        estimate than the speed so far."""
        now = time.monotonic()
        self._count_reading("", 0, 0, now)
        self.updates += 1
        if self.updates == 2:
            self.start = (self.done, self.last_update)
        self.start = self.start or (step, self._without_reading(now))
        self.done, self.values, self.last_update = step, values, self._without_reading(now)
        self.estimated = None if left is None else (left, now)
        self._show(step, "", now, final=step >= self.total)

    def within(self, work: str, done: float, total: int) -> None:
        """Report what is done of some work inside a round. Parts of this loop's own unit, and answers that are sampled
        for one of answers, move the position."""
        now, position, inner = time.monotonic(), float(self.done), f"{work} {int(done)}/{total}" if total > 1 else work
        self._count_reading(work, done, total, now)
        if work == self.unit:
            position, inner = done, ""
        elif work == "sampling" and self.unit.endswith(("answer", "sample")):
            position, inner = min(self.done + done, self.total), ""
        self.start = self.start or (position, self._without_reading(now))
        self._show(position, inner, now, final=False)

    def skip(self, rounds: int) -> None:
        """Some further rounds were done by an earlier process; they say nothing about the speed."""
        self.done += rounds
        if self.start is not None:
            self.start = (self.start[0] + rounds, self.start[1])

    def note(self, text: str) -> None:
        """Print a line that the next progress line does not replace."""
        self._print(f"{self.label} {text}", final=True)

    def seconds_left(self, position: float) -> float | None:
        """The time left at the speed since `start`, or what the loop estimated less the time since. None without a
        basis."""
        now = time.monotonic()
        if self.estimated is not None:
            return max(0.0, self.estimated[0] - (now - self.estimated[1]))
        first, since = self.start or (position, now)
        spent = self._without_reading(now) - since
        if position <= first or (self.updates <= BASIS_UPDATES and spent < BASIS_SECONDS):
            return None
        left = spent / (position - first) * (self.total - position)
        if not self.reads:
            return left
        if not self.rows_read:
            return None
        return left + self.reading_seconds / self.rows_read * max(0.0, self.reads - self.rows_read)

    def _count_reading(self, work: str, done: float, total: int, now: float) -> None:
        """The time since the last report went into the work that it named."""
        if self.reading is not None:
            before, whole = self.reading
            goes_on = work == "reading" and total == whole and done >= before
            self.rows_read += (done if goes_on else whole) - before
            self.reading_seconds += now - self.last_report
        self.reading, self.last_report = (done, total) if work == "reading" else None, now

    def _without_reading(self, now: float) -> float:
        return now - self.reading_seconds if self.reads else now

    def _show(self, position: float, inner: str, now: float, final: bool) -> None:
        if not final and now - self.last_print < (0.1 if self.terminal else self.seconds):
            return
        self.last_print = now
        count = f"{self.unit} {int(position)}/{self.total}" if self.total > 1 else self.unit
        numbers = [f"{name} {value:.4g}" for name, value in self.values.items() if value is not None]
        left = None if position >= self.total else self.seconds_left(position)
        rest = f"done in {duration(now - self.started)}" if final else "" if left is None else f"{duration(left)} left"
        self._print("  ".join(filter(None, [f"{self.label} {count}", *numbers, inner, rest])), final)

    def _print(self, line: str, final: bool) -> None:
        if self.terminal:
            sys.stdout.write(f"\r\033[K{line}" + ("\n" if final else ""))
        else:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()


class Watch:
    """Shows the reports of a stage's slow work: inside its loop where there is one, otherwise as a loop of their own.
    The first is shown at once. Warns, once, of a slow sampler."""

    def __init__(self, label: str, seconds: float, warn: Callable[[str], None]) -> None:
        self.label, self.seconds, self.warn = label, seconds, warn
        self.loop: Progress | None = None
        """The last loop of the stage."""
        self.own: Progress | None = None
        self.tokens, self.sampling = 0, 0.0
        """Tokens that were drawn, and the seconds that this took."""
        self.warned = False
        self.last_token: float | None = None
        """The time of the last report of sampling; None where other work has been reported since."""

    def begin(self, total: int, unit: str, done: int = 0, reads: int = 0) -> Progress:
        """A reporter for a loop of `total` rounds, of which an earlier process has done `done`; `reads` as in
        `Progress`."""
        self.loop = Progress(self.label, total, unit, self.seconds, done, reads)
        return self.loop

    def __call__(self, work: str, done: float, total: int, tokens: int = 0) -> None:
        """See `rlhf_core.progress.Listener`."""
        loop = self.loop
        if loop is None or loop.done >= loop.total:
            if self.own is None or (self.own.unit, self.own.total) != (work, total) or done < self.own.done:
                shown = max((one.last_print for one in (self.own, loop) if one), default=0.0)
                self.own = Progress(self.label, total, work, self.seconds)
                self.own.last_print = shown - self.seconds + min(self.seconds, 1.0)  # new work is shown after a second
            loop = self.own
            loop.done = int(done)
        loop.within(work, done, total)
        now = time.monotonic()
        if tokens and self.last_token is not None:
            self.tokens += tokens
            self.sampling += now - self.last_token
            self._warn_of_slow_sampler(loop, done)
        self.last_token = now if tokens else None

    def _warn_of_slow_sampler(self, loop: Progress, done: float) -> None:
        if self.warned or self.sampling < SAMPLED_SECONDS or self.tokens >= SLOW * self.sampling:
            return
        self.warned = True
        whole = loop is self.loop and loop.unit.endswith(("answer", "sample"))  # else it is a part of other work
        left = loop.seconds_left(min(loop.done + done, loop.total)) if whole else None
        takes = "" if left is None else f"; the rest of this loop takes about {duration(left)}"
        self.warn(
            f"the sampler draws {self.tokens / self.sampling:.0f} tokens a second{takes}. Fewer or shorter answers "
            "(max_new_tokens), larger batches of them, or a GPU take less time"
        )


def is_progress(line: str) -> bool:
    """Whether a stage's line is one of `Progress` that the next one replaces."""
    return bool(_LINE.match(line)) and "  done in " not in line


def duration(seconds: float) -> str:
    """`4 s`, `2 min 05 s`, `1 h 20 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
