"""SIGTERM and Ctrl-C end a stage at once, but a loop that can save its progress only after the current step. A second
signal ends that at once, too."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupts:
    """Handles both signals."""

    def __init__(self) -> None:
        self.stopping = False
        self._deferred = False

    def install(self) -> None:
        """Handle the signals from now on, except those that were ignored when this process started."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this block the first signal only sets `stopping`; the loop inside saves, and calls `leave`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self.leave()

    def leave(self) -> None:
        """Raise KeyboardInterrupt when a signal has come."""
        if self.stopping:
            raise KeyboardInterrupt

    def is_requested(self) -> bool:
        """Whether a signal has come."""
        return self.stopping

    def _handle(self, *_: object) -> None:
        if self.stopping or not self._deferred:
            self.stopping = True
            raise KeyboardInterrupt
        self.stopping = True
        with suppress(OSError):  # print may be in the middle of a line
            os.write(2, b"stopping when this step is done and saved; the same signal again stops at once\n")
