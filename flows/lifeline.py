"""The tie between a run and its Prefect server. Prefect tells how a flow ended for minutes after its server has died,
in tracebacks, and forgets how the stages ended; so the command line holds a lifeline, asks at the end of the stages,
and leaves with one line. A served flow has none: its runner outlives it and says so itself."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from flows import server
from flows.stages import Outcome

Leave = Callable[[BaseException | None, list[Outcome]], NoReturn]
"""Ends the process; gets what ended the flow (None: nothing) and how the stages ended, as far as they did."""

ATTEMPTS = 3
PAUSE_SECONDS = 1.0


@dataclass
class _Tie:
    url: str | None = None
    leave: Leave | None = None


_tie = _Tie()


def hold(url: str, leave: Leave) -> None:
    """From now on this process runs one flow with the server at `url`; `leave` is for the case that it is lost."""
    _tie.url, _tie.leave = url, leave
    logging.raiseExceptions = False  # Prefect's sender of logs prints each failure of its own otherwise


def lost() -> bool:
    """Whether the server has stopped answering; takes seconds to be sure of it."""
    if _tie.url is None or server.answers(_tie.url):
        return False
    for _ in range(ATTEMPTS - 1):
        time.sleep(PAUSE_SECONDS)
        if server.answers(_tie.url):
            return False
    return True


@contextmanager
def tied() -> Iterator[list[Outcome]]:
    """Around everything of a flow that does not need the server: where it is lost, the process ends here. The block
    fills the list with how the stages ended."""
    outcomes: list[Outcome] = []
    try:
        yield outcomes
    except BaseException as error:
        _leave_if_lost(error, outcomes)
        raise
    _leave_if_lost(None, outcomes)


def _leave_if_lost(error: BaseException | None, outcomes: list[Outcome]) -> None:
    if lost() and _tie.leave is not None:
        _tie.leave(error, outcomes)
