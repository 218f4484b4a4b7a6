"""The sender: carries outboxes to MLflow, in one go (`drain`) or beside a stage while it works (`SenderProcess`), which
also sends what earlier stages had to leave.

Order and turns only: one sender an outbox at a time, outboxes of one stage key strictly in turn, an outbox is deleted
when all of it has arrived. What an event becomes in MLflow stands in `runs.py`. Beside a stage it is a process and not
a thread: importing mlflow and writing metrics held the interpreter's lock, and with it the training, for up to 270 ms.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.locks import FileLock
from tasks.tracking import outbox, settings

if TYPE_CHECKING:
    from tasks.tracking.runs import Shipper

GATHER_SECONDS = 1.0  # metrics of this long travel together
LONGEST_PAUSE_SECONDS = 30.0
ATTEMPTS_AT_THE_END = 2
SECONDS_AT_THE_END = 5.0  # a sender outlives its stage by no more than this
NICENESS = 5
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Drained:
    """What `drain` did: outboxes emptied, outboxes that stay, and why (None where none stays)."""

    sent: int
    left: int
    reason: str | None


def warn_once() -> Warn:
    """A printer to stderr that says each kind of warning (the text before a bracket) only once."""
    said: set[str] = set()

    def warn(text: str) -> None:
        kind = text.split("(")[0]
        if kind not in said:
            said.add(kind)
            print(text, file=sys.stderr, flush=True)

    return warn


def drain(root: Path, timeout: float = 60.0, uri: str | None = None, warn: Warn | None = None) -> Drained:
    """Send everything that waits under `root`; a run whose process died is closed as KILLED.

    Ends after `timeout` seconds plus at most one request, or when MLflow fails twice in a row. Outboxes of living
    processes are sent as far as they are written and do not count as left.
    """
    settings.prepare_environment()
    deadline = time.monotonic() + timeout
    sent, failures = 0, 0
    reason: str | None = None
    if not outbox.pending(root):
        return Drained(0, 0, None)
    shipper = _shipper(root, uri or settings.tracking_uri(root), warn or warn_once())
    while True:
        try:
            for folder in outbox.pending(root):
                sent += deliver(root, folder, shipper, lambda: time.monotonic() > deadline)
            failures, reason = 0, None
        except outbox.Unreachable as error:
            failures, reason = failures + 1, str(error)
        left = [folder for folder in outbox.pending(root) if not outbox.is_owned(folder)]
        if not left or failures == ATTEMPTS_AT_THE_END or time.monotonic() > deadline:
            return Drained(sent, len(left), (reason or "no time left") if left else None)
        time.sleep(0.2)


def deliver(root: Path, folder: Path, shipper: Shipper, stop: Callable[[], bool]) -> bool:
    """Send one outbox as far as it goes; true when all of it has arrived and it is gone.

    False while its owner still writes, another sender has it, or an older outbox of the same stage key waits.
    Raises `Unreachable`.
    """
    if any(_precedes(other, folder) for other in outbox.pending(root)):
        return False
    lock = FileLock(folder / outbox.SENDER_LOCK)
    if not lock.acquire():
        return False
    try:
        state = outbox.State.load(folder, shipper.uri_mark)
        while not stop() and (folder / outbox.EVENTS).is_file():
            owned = outbox.is_owned(folder)  # asked before reading: then what a dead owner wrote is all there
            events = outbox.read_events(folder, state.offset)
            if events:
                shipper.ship(events, state, folder)
            elif owned:
                return False
            else:
                shipper.killed(state)
                outbox.remove(folder)
                return True
        return False
    finally:
        lock.release()


class SenderProcess:
    """Sends one outbox, and older ones of its stage key before it, from a process beside the stage."""

    def __init__(self, root: Path, folder: Path, uri: str, warn: Warn) -> None:
        self._folder = folder
        self._warn = warn
        self._process: subprocess.Popen[bytes] | None = None
        project = Path(__file__).resolve().parents[2]
        path = os.pathsep.join([str(project), *filter(None, [os.environ.get("PYTHONPATH")])])
        # The address may hold a password: in the environment it stays out of the list of processes.
        environment = os.environ | {"MLFLOW_TRACKING_URI": uri, "PYTHONPATH": path}
        command = [sys.executable, "-m", "tasks.tracking.sender", str(root.resolve()), folder.name]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, bufsize=0
            )
        except OSError as error:
            warn(f"tracking: no sender ({error}); the stage goes on, and `leash sync` sends later")

    def finish(self, timeout: float) -> bool:
        """The outbox is closed: wait up to `timeout` seconds until it has arrived; false when it has not."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(b".")  # a forked data loader may keep the pipe from ending
            self._process.stdin.close()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                self._warn("tracking: MLflow has not taken everything in time; `leash sync` sends the rest")
        return not self._folder.exists()


def accompany(root: Path, folder: Path, uri: str, warn: Warn) -> None:
    """Send `folder` while its owner writes; ends when it is gone, or given up after the owner's end.

    Standard input is the tie to the owner: as soon as it can be read, the owner has closed or died.
    """
    shipper = _shipper(root, uri, warn)
    failures, end, pause = 0, float("inf"), 0.0
    while folder.exists() and time.monotonic() < end:
        if end == float("inf") and select.select([sys.stdin], [], [], pause)[0]:
            end, failures, pause = time.monotonic() + SECONDS_AT_THE_END, 0, 0.1
        elif end < float("inf"):
            time.sleep(pause)
        try:
            for older in outbox.pending(root):
                if _precedes(older, folder):
                    deliver(root, older, shipper, _never)
            deliver(root, folder, shipper, _never)
            _deliver_abandoned(root, folder, shipper)
            failures, pause = 0, GATHER_SECONDS if end == float("inf") else 0.1
        except outbox.Unreachable as error:
            where = settings.without_credentials(uri)
            warn(
                f"tracking: MLflow does not answer ({where}: {error}); the training goes on, and "
                "`leash sync` sends later what is missing"
            )
            failures += 1
            pause = min(LONGEST_PAUSE_SECONDS, 2.0**failures) if end == float("inf") else 0.2
            if failures == ATTEMPTS_AT_THE_END and end < float("inf"):
                return


def _deliver_abandoned(root: Path, own: Path, shipper: Shipper) -> None:
    """What stages left that ended before MLflow had all of it; given up as soon as our owner ends."""

    def owner_ends() -> bool:
        return bool(select.select([sys.stdin], [], [], 0)[0])

    for other in outbox.pending(root):
        if other != own and not outbox.is_owned(other) and not owner_ends():
            deliver(root, other, shipper, owner_ends)


def _precedes(other: Path, folder: Path) -> bool:
    return outbox.series(other) == outbox.series(folder) and outbox.created(other) < outbox.created(folder)


def _shipper(root: Path, uri: str, warn: Warn) -> Shipper:
    from tasks.tracking.runs import Shipper  # imports mlflow: a second

    return Shipper(root, uri, warn)


def _never() -> bool:
    return False


def main() -> None:
    """`python -m tasks.tracking.sender ROOT OUTBOX`, started by `SenderProcess`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the stage: it closes its run, and we still send that
    os.nice(NICENESS)
    settings.prepare_environment()
    root = Path(sys.argv[1])
    accompany(root, outbox.outbox_folder(root) / sys.argv[2], os.environ["MLFLOW_TRACKING_URI"], warn_once())


if __name__ == "__main__":
    main()
