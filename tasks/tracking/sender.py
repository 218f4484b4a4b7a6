"""Sends outboxes to MLflow, all at once (`drain`) or while a stage runs (`SenderProcess`).

An outbox has one sender at a time; outboxes of one stage key are sent in order, and deleted when all has arrived. The
sender is a process and not a thread: importing mlflow held the interpreter's lock for up to 270 ms.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.locks import FileLock
from tasks.tracking import outbox, settings
from tasks.tracking.system import SystemMetrics

if TYPE_CHECKING:
    from tasks.tracking.runs import MlflowWriter

GATHER_SECONDS = 5.0  # metrics of this time are sent together
LONGEST_PAUSE_SECONDS = 30.0
ATTEMPTS_AT_THE_END = 2
SECONDS_AT_THE_END = 5.0  # a sender ends at most this long after its stage
SECONDS_FOR_THE_REST = 30.0
NICENESS = 19  # a training on all cores stops when one of them is busy
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Drained:
    """Result of `drain`: the number of outboxes sent and left, and why some are left."""

    sent: int
    left: int
    reason: str | None

    def __str__(self) -> str:
        """A message if outboxes are left, else an empty string."""
        boxes = "1 outbox waits" if self.left == 1 else f"{self.left} outboxes wait"
        return f"tracking: {boxes} for MLflow ({self.reason}); `leash sync` sends what is missing" * bool(self.left)


def warn_once() -> Warn:
    """A function that prints each kind of warning (the text before a bracket) to stderr once."""
    printed: set[str] = set()

    def warn(text: str) -> None:
        kind = text.split("(")[0]
        if kind not in printed:
            printed.add(kind)
            print(text, file=sys.stderr, flush=True)

    return warn


def drain(root: Path, timeout: float = 60.0, uri: str | None = None, warn: Warn | None = None) -> Drained:
    """Send all outboxes under `root`; a run whose process died is closed as KILLED.

    Ends after `timeout` seconds plus at most one request, or when MLflow fails twice in a row. Outboxes of running
    processes are sent as far as they are written and do not count as left.
    """
    settings.prepare_environment()
    deadline = time.monotonic() + timeout
    sent, failures = 0, 0
    reason: str | None = None
    if not outbox.pending(root):
        return Drained(0, 0, None)
    writer = _writer(root, uri or settings.tracking_uri(root), warn or warn_once())
    while True:
        try:
            for folder in outbox.pending(root):
                sent += deliver(root, folder, writer, lambda: time.monotonic() > deadline)
            failures, reason = 0, None
        except outbox.Unreachable as error:
            failures, reason = failures + 1, str(error)
        left = [folder for folder in outbox.pending(root) if not outbox.is_owned(folder)]
        if not left or failures == ATTEMPTS_AT_THE_END or time.monotonic() > deadline:
            return Drained(sent, len(left), (reason or "no time left") if left else None)
        time.sleep(0.2)


def deliver(root: Path, folder: Path, writer: MlflowWriter, stop: Callable[[], bool]) -> bool:
    """Send one outbox; True when all of it has arrived and it is deleted.

    False if its owner still writes, another sender has it, or an older outbox of the same stage key waits. Raises
    Unreachable.
    """
    if any(_precedes(other, folder) for other in outbox.pending(root)):
        return False
    lock = FileLock(folder / outbox.SENDER_LOCK)
    if not lock.acquire():
        return False
    try:
        state = outbox.State.load(folder, writer.uri_mark)
        while not stop() and (folder / outbox.EVENTS).is_file():
            owned = outbox.is_owned(folder)  # checked before reading, so that all events of a dead owner are read
            events = outbox.read_events(folder, state.offset)
            if events:
                writer.write(events, state, folder)
            elif owned:
                return False
            else:
                writer.killed(state)
                outbox.remove(folder)
                return True
        return False
    finally:
        lock.release()


class SenderProcess:
    """A process that sends one outbox, and older ones, while the stage runs. Starts after `after` seconds, because
    importing mlflow takes longer than a short stage. Every `system_seconds` (0: never) it samples system metrics of
    this process."""

    def __init__(
        self, root: Path, folder: Path, uri: str, warn: Warn, after: float, system_seconds: float = 0.0
    ) -> None:
        self._folder = folder
        self._system_seconds = system_seconds
        self._warn = warn
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._timer = threading.Timer(after, self._start, (root, uri))
        self._timer.daemon = True
        self._timer.start()

    def _start(self, root: Path, uri: str) -> None:
        with self._starting:
            self._process = _start_sender(
                root, uri, self._warn, self._folder.name, str(os.getpid()), str(self._system_seconds)
            )

    def finish(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the closed outbox has arrived; returns whether it has. The process ends by
        itself some seconds later."""
        self._timer.cancel()
        with self._starting:
            process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.write(b".")  # a forked data loader may keep the pipe from ending
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        return not self._folder.exists()


def send_rest(root: Path, uri: str, warn: Warn, wait: bool) -> None:
    """Send all outboxes from a new process, which prints one line if some are left. Without `wait` it prints nothing
    and the caller does not wait."""
    process = _start_sender(root, uri, warn, quiet=not wait)
    if process is not None and wait:
        process.wait()


def _start_sender(root: Path, uri: str, warn: Warn, *stage: str, quiet: bool = False) -> subprocess.Popen[bytes] | None:
    """Start a sender in its own session: signals to the stage's process group do not reach it."""
    project = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(project), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The address may contain a password: the environment is not visible in the process list.
    environment = os.environ | {"MLFLOW_TRACKING_URI": uri, "PYTHONPATH": path}
    command = [sys.executable, "-m", "tasks.tracking.sender", str(root.resolve()), *stage]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if stage else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if quiet else None,
            env=environment,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        warn(f"tracking: no sender ({error}); the stage goes on, and `leash sync` sends later")
        return None


def send_beside(root: Path, folder: Path, uri: str, warn: Warn, system: SystemMetrics) -> None:
    """Send `folder` while its owner writes; ends when it is sent, or some seconds after the owner's end. `system` stops
    with the owner.

    Standard input becomes readable when the owner closes its outbox or dies.
    """
    writer = _writer(root, uri, warn)
    failures, end, pause = 0, float("inf"), 0.0
    while folder.exists() and time.monotonic() < end:
        if end == float("inf") and select.select([sys.stdin], [], [], pause)[0]:
            end, failures, pause = time.monotonic() + SECONDS_AT_THE_END, 0, 0.1
            system.stop()
        elif end < float("inf"):
            time.sleep(pause)
        try:
            for older in outbox.pending(root):
                if _precedes(older, folder):
                    deliver(root, older, writer, _never)
            deliver(root, folder, writer, _never)
            _deliver_abandoned(root, folder, writer)
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


def _deliver_abandoned(root: Path, own: Path, writer: MlflowWriter) -> None:
    """Send outboxes of earlier stages; stops when the owner of `own` ends."""

    def owner_ends() -> bool:
        return bool(select.select([sys.stdin], [], [], 0)[0])

    for other in outbox.pending(root):
        if other != own and not outbox.is_owned(other) and not owner_ends():
            deliver(root, other, writer, owner_ends)


def _precedes(other: Path, folder: Path) -> bool:
    return outbox.series(other) == outbox.series(folder) and outbox.created(other) < outbox.created(folder)


def _writer(root: Path, uri: str, warn: Warn) -> MlflowWriter:
    from tasks.tracking.runs import MlflowWriter  # imports mlflow: a second

    return MlflowWriter(root, uri, warn)


def _never() -> bool:
    return False


def main() -> None:
    """`python -m tasks.tracking.sender ROOT [OUTBOX PID SECONDS]`: send this outbox while its stage, the process PID,
    runs, with system metrics every SECONDS; or send all outboxes once."""
    settings.prepare_environment()
    root, uri, *stage = Path(sys.argv[1]), os.environ["MLFLOW_TRACKING_URI"], *sys.argv[2:]
    if stage:
        folder, pid, seconds = outbox.outbox_folder(root) / stage[0], int(stage[1]), float(stage[2])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the stage closes its run, and that is still sent
        os.nice(NICENESS)
        with suppress(FileNotFoundError):  # all of it has been sent
            system = SystemMetrics(outbox.Appender(folder).metrics, pid, seconds)
            system.start()
            send_beside(root, folder, uri, warn_once(), system)
    elif (drained := drain(root, SECONDS_FOR_THE_REST, uri)).left:
        print(settings.without_credentials(str(drained)), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
