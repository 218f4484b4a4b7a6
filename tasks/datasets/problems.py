"""Problems of raw data: all are counted, the first ones printed, and the run is refused with one line."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NoReturn

from rlhf_core.errors import UserError

MOST_PRINTED = 20
Log = Callable[[str], None]
"""Prints one line."""


def refuse(problem: str) -> NoReturn:
    """Stop at the first problem: UserError."""
    raise UserError(problem)


def print_problems(problems: Iterable[str], count: int, log: Log) -> None:
    """Print the first of `count` problems; a single one is in the error that follows."""
    if count > 1:
        for problem in islice(problems, MOST_PRINTED):
            log(problem)
        if count > MOST_PRINTED:
            log(f"… and {count - MOST_PRINTED} more")


class Problems:
    """Counts problems, and keeps the first ones."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, problem: str) -> None:
        """Add one problem: where, what, and what to do."""
        self.count += 1
        if len(self.first) < MOST_PRINTED:
            self.first.append(problem)

    def refuse(self, log: Log) -> None:
        """Raise UserError if there is a problem; several are printed first."""
        if self.count:
            print_problems(self.first, self.count, log)
            raise UserError(self.first[0] + (f" (first of {self.count} problems)" if self.count > 1 else ""))
