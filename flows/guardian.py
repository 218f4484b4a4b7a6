"""The guardian: a small process beside a driver that stops what the driver leaves running when it is killed.

It reads on its standard input which process groups are alive. The end of that pipe is the end of the driver, however
it came. Until the last group is gone it keeps the driver's lock of the workspace (`driver.py`), which it has inherited,
and the reading ends of the groups' output (on Linux), so that a stage may print while it closes its files.
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
    """The driver's end. Nothing here fails the driver: without a guardian it is as it was before there was one."""

    def __init__(self, keep: int | None) -> None:
        """Start the process; `keep` is a file descriptor that it shall hold until the last group is gone."""
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flows.guardian"], cwd=Path(__file__).resolve().parents[1], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            pass_fds=() if keep is None else (keep,), bufsize=0,
        )  # fmt: skip

    def watch(self, group: int, ladder: processes.Ladder) -> None:
        """From now on, stop this group down this ladder when the driver is gone."""
        self._tell({"group": group, "ladder": [[int(number), seconds] for number, seconds in ladder]})

    def forget(self, group: int) -> None:
        """The group has ended."""
        self._tell({"group": group})

    def dismiss(self) -> None:
        """The driver needs it no more; what it still watches is stopped."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._lock, suppress(OSError):
            self._process.stdin.write((json.dumps(message) + "\n").encode())


def main() -> None:
    """`python -m flows.guardian`: follow standard input to its end, then stop every group that is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ladders: dict[int, processes.Ladder] = {}
    outputs: dict[int, int] = {}
    for line in sys.stdin:
        message = json.loads(line)
        group = message["group"]
        if "ladder" in message:
            ladders[group] = tuple((signal.Signals(number), seconds) for number, seconds in message["ladder"])
            outputs[group] = _output_of(group)
        else:
            ladders.pop(group, None)
            _close(outputs.pop(group, -1))
    _stop(ladders, list(outputs.values()))


def _stop(ladders: dict[int, processes.Ladder], outputs: list[int]) -> None:
    stoppers = [threading.Thread(target=processes.stop, args=(group, None, how)) for group, how in ladders.items()]
    for stopper in stoppers:
        stopper.start()
    for stopper in stoppers:
        while stopper.is_alive():
            for descriptor in outputs:
                _drain(descriptor)
            stopper.join(0.05)


def _output_of(group: int) -> int:
    """A reading end of the pipe that the group's leader prints to; -1 where there is none to be had."""
    path = f"/proc/{group}/fd/1"
    with suppress(OSError):
        if stat.S_ISFIFO(os.stat(path).st_mode):  # noqa: PTH116 - a link of the kernel's, no path
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
