"""The guardian: a small process that stops what a driver leaves running when the driver is killed.

It reads from standard input which process groups are alive; that pipe is closed when the driver ends. Until the last
group has ended it holds the driver's lock of the workspace, which it inherits, and the reading ends of the groups'
output (on Linux), so that a stage can print while it closes its files.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from flows import processes


class Guardian:
    """The driver's end of the pipe. A guardian that has died never fails the driver."""

    def __init__(self, keep: int | None) -> None:
        """Start the process; it holds the file descriptor `keep` until the last group is gone."""
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flows.guardian"], cwd=Path(__file__).resolve().parents[1], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            pass_fds=() if keep is None else (keep,), bufsize=0,
        )  # fmt: skip

    def watch(self, group: int, signals: processes.StopSignals) -> None:
        """Send these signals to the group when the driver is gone."""
        self._send({"group": group, "signals": [[int(number), seconds] for number, seconds in signals]})

    def unwatch(self, group: int) -> None:
        """The group has ended."""
        self._send({"group": group})

    def close(self) -> None:
        """End the guardian; it stops the groups that it still watches."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._lock, suppress(OSError):
            self._process.stdin.write((json.dumps(message) + "\n").encode())


def main() -> None:
    """`python -m flows.guardian`: follow standard input to its end, then stop every group that is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signals: dict[int, processes.StopSignals] = {}
    outputs: dict[int, int] = {}
    for line in sys.stdin:
        message = json.loads(line)
        group = message["group"]
        if "signals" in message:
            signals[group] = tuple((signal.Signals(number), seconds) for number, seconds in message["signals"])
            outputs[group] = _output_of(group)
        else:
            signals.pop(group, None)
            _close(outputs.pop(group, -1))
    _stop(signals, list(outputs.values()))


def _stop(signals: dict[int, processes.StopSignals], outputs: list[int]) -> None:
    stoppers = [threading.Thread(target=processes.stop, args=(group, None, how)) for group, how in signals.items()]
    for stopper in stoppers:
        stopper.start()
    for stopper in stoppers:
        while stopper.is_alive():
            for descriptor in outputs:
                _drain(descriptor)
            stopper.join(0.05)


def _output_of(group: int) -> int:
    """A reading end of the pipe that the group's leader prints to; -1 where there is none."""
    path = f"/proc/{group}/fd/1"
    with suppress(OSError):
        if stat.S_ISFIFO(os.stat(path).st_mode):  # noqa: PTH116 - a link of the kernel, not a path
            return os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    return -1


def _drain(descriptor: int) -> None:
    with suppress(OSError):
        while descriptor >= 0 and os.read(descriptor, 65536):
            pass


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


if __name__ == "__main__":
    main()
