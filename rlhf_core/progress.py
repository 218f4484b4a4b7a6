"""Progress from inside slow loops. A loop reports how far it is; whoever shows progress listens. No result depends on
it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, float, int, int], None]
"""Receives the kind of work, such as "sampling", how much of how much is done (parts of a row or step count), and the
tokens that were drawn since the last report."""

_listener: Listener | None = None


def report(work: str, done: float, total: int, tokens: int = 0) -> None:
    """Report that `done` of `total` rows, passes or steps of some work are done, for which `tokens` were drawn since
    the last report. Nothing happens where nothing listens."""
    if _listener is not None:
        _listener(work, done, total, tokens)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """In this context `listener` receives every report of the process."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
