"""Problems of raw data: all are counted, the first ones listed, and the run is refused in one line."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NoReturn

from rlhf_core.errors import UserError

LISTED = 20
"""Problems that are listed at most."""

Say = Callable[[str], None]
"""Prints one line."""


def refuse(problem: str) -> NoReturn:
    """Stop at the first problem: UserError."""
    raise UserError(problem)


def print_problems(problems: Iterable[str], count: int, say: Say) -> None:
    """Print the first of `count` problems; a single one is left to the error that follows."""
    if count > 1:
        for problem in islice(problems, LISTED):
            say(problem)
        if count > LISTED:
            say(f"… and {count - LISTED} more")


class Problems:
    """Counts problems, and keeps the first ones."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, problem: str) -> None:
        """Note one problem: where, what, and what to do."""
        self.count += 1
        if len(self.first) < LISTED:
            self.first.append(problem)

    def refuse(self, say: Say) -> None:
        """Raise UserError if there is a problem; several are printed first."""
        if self.count:
            print_problems(self.first, self.count, say)
            raise UserError(self.first[0] + (f" (first of {self.count} problems)" if self.count > 1 else ""))
