"""Commands in process groups of their own: live output, time limits, and a stop that returns when the group is empty.
A guardian beside each group, this file as a program, stops it when the process that started it is killed.

SIGTERM ends `dvc` but leaves the stage that it started running; SIGINT ends both, the stage through
`KeyboardInterrupt`, so that it can save and close its files. The registry of live groups is a global of this module,
because Prefect pickles the module of a flow.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

StopSignals = tuple[tuple[signal.Signals, float], ...]
"""Signals to send one after another, each with the seconds to wait for its effect."""

STAGE_SIGNALS: StopSignals = ((signal.SIGINT, 30.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
STOPPING_SECONDS = sum(seconds for _, seconds in STAGE_SIGNALS) + 5.0
"""How long the guardians of a killed run may take to end its stages."""
SERVER_SIGNALS: StopSignals = ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))
KILL_SIGNALS: StopSignals = ((signal.SIGKILL, 5.0),)
RUNNER_SIGNALS: StopSignals = ((signal.SIGINT, 60.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))
"""For a process that itself stops stages with `STAGE_SIGNALS`."""
RUNNERS_STOPPING_SECONDS = sum(seconds for _, seconds in RUNNER_SIGNALS) + 5.0
"""How long the guardians of a killed study may take to end its runs."""


class Stopped(Exception):
    """The run was stopped, and the command with it."""


class TimedOut(Exception):
    """The command was stopped because it took too long."""


@dataclass
class _Registry:
    """The groups alive, and whether new ones may start."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    groups: "dict[int, tuple[subprocess.Popen[bytes], StopSignals]]" = field(default_factory=dict)
    closing: bool = False
    interrupt: BaseException | None = None
    kept: list[int] = field(default_factory=list)
    """File descriptors of locks that guardians hold, too."""
    leave: Callable[[int, FrameType | None], None] | None = None


_live = _Registry()


@contextmanager
def keeping(lock: int | None) -> Iterator[None]:
    """Within the block, the lock with this file descriptor is held also by the guardians: after a kill of this process
    until its last command has ended."""
    _live.kept += [] if lock is None else [lock]
    try:
        yield
    finally:
        _live.kept = [kept for kept in _live.kept if kept != lock]


def install_signal_handlers() -> None:
    """Make SIGTERM and a closed terminal end the run as Ctrl-C does, so that every stage is stopped."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    _live.leave = leave
    signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, leave)


@contextmanager
def session() -> Iterator[None]:
    """However the block ends, what it started through `run` is stopped, and nothing starts until the next session."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs with SIGINT ignored, and children inherit that, but not this handler.
        signal.signal(signal.SIGINT, lambda number, frame: None)
    if _live.leave is not None:  # Prefect replaces the handler within a flow, and gives back what it found
        signal.signal(signal.SIGTERM, _live.leave)
    with _live.lock:
        _live.closing, _live.interrupt = False, None
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as interrupt:
        _live.interrupt = interrupt
        raise
    finally:
        stop_all()


def run(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    on_line: Callable[[str], None],
    timeout: float | None = None,
    signals: StopSignals = STAGE_SIGNALS,
) -> int:
    """Run `command` in a group of its own; hand each line of its stdout and stderr to `on_line` as it comes.

    Returns the exit status (-N for signal N) once the whole group is gone. `timeout` is in seconds.
    Raises Stopped after `stop_all`, TimedOut after `timeout`.
    """
    with _live.lock:
        if _live.closing:
            raise Stopped(command[0])
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        _live.groups[process.pid] = (process, signals)
    guardian = None
    try:
        guardian = guard(process, signals, _live.kept)
        timed_out = _follow(process, on_line, timeout, signals)
    except BaseException:  # an interrupt: the command goes on printing while it stops
        reader = threading.Thread(target=_follow, args=(process, on_line, None, signals), daemon=True)
        reader.start()
        stop(process.pid, process, signals)
        reader.join(5.0)
        raise
    finally:
        stop(process.pid, process, signals)
        with _live.lock:
            _live.groups.pop(process.pid, None)
            closing = _live.closing
        if guardian is not None:
            dismiss(guardian)
    if closing and process.returncode != 0:
        raise Stopped(command[0])
    if timed_out and process.returncode != 0:
        raise TimedOut(f"stopped after {timeout:g} seconds")
    return process.returncode


def guard(
    process: "subprocess.Popen[bytes]", signals: StopSignals, kept: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    """Start a guardian: it sends these signals to the group of `process` when this process is killed. Until the group
    is empty it holds the `kept` file descriptors, and reads what the group prints, so that a stage can print while it
    closes its files."""
    output = process.stdout.fileno() if process.stdout else None
    words = [str(process.pid), str(output or ""), *(f"{number.value}:{seconds}" for number, seconds in signals)]
    return subprocess.Popen(
        [sys.executable, "-P", __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True, pass_fds=[*kept, *([output] if output else [])],
    )  # fmt: skip


def dismiss(guardian: "subprocess.Popen[bytes]") -> None:
    """End a guardian; it leaves its group alone."""
    guardian.communicate(b"done")


def stop(group: int, leader: "subprocess.Popen[bytes] | None" = None, signals: StopSignals = STAGE_SIGNALS) -> None:
    """Send these signals to the process group, one after another, until it is empty."""
    for number, grace in signals:
        if _empty(group, leader):
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and not _empty(group, leader):
            time.sleep(0.05)


def stop_all() -> None:
    """Stop every live group, all at the same time; none starts until the next `session`.

    A second interrupt while this waits kills them at once.
    """
    with _live.lock:
        _live.closing = True
        groups = dict(_live.groups)
    stoppers = [threading.Thread(target=stop, args=(group, *how), daemon=True) for group, how in groups.items()]
    for stopper in stoppers:
        stopper.start()
    try:
        for stopper in stoppers:
            stopper.join()
    except BaseException:
        for group in groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        raise


def is_stopping() -> bool:
    """Whether `stop_all` was called in this session."""
    return _live.closing


def raise_if_stopped() -> None:
    """Raise Stopped after `stop_all`: for code that waits for something else than a process."""
    if _live.closing:
        raise Stopped("it waited")


def interrupt() -> BaseException | None:
    """What ended the last session early."""
    return _live.interrupt


def _follow(
    process: "subprocess.Popen[bytes]", on_line: Callable[[str], None], timeout: float | None, signals: StopSignals
) -> bool:
    """Read until the leader has ended and its pipe is empty; returns whether the time limit was reached.

    A carriage return ends a line as a line feed does. Reading goes on while the group is being stopped.
    """
    assert process.stdout is not None
    started, rest, stopper = time.monotonic(), b"", None
    pipe = process.stdout
    while True:
        ended = process.poll() is not None
        ready, _, _ = select.select([pipe], [], [], 0.0 if ended else 0.2)
        chunk = os.read(pipe.fileno(), 65536) if ready else b""
        *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            on_line(line.decode("utf-8", "replace").rstrip())
        if ended and not chunk:
            break
        if ready and not chunk:
            time.sleep(0.05)  # the pipe has ended before the leader: `select` returns at once
        if stopper is None and timeout is not None and time.monotonic() - started > timeout:
            stopper = threading.Thread(target=stop, args=(process.pid, process, signals), daemon=True)
            stopper.start()
    pipe.close()
    if rest:
        on_line(rest.decode("utf-8", "replace").rstrip())
    return stopper is not None


def _empty(group: int, leader: "subprocess.Popen[bytes] | None") -> bool:
    """Whether no member of the group is alive. The kernel still counts zombies; this does not."""
    if leader is not None and leader.poll() is None:
        return False  # its first thread may be dead already, and others not
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def _main(group: str, output: str, *signals: str) -> None:
    """What a guardian does: its standard input ends with `done`, or without it where the process that holds the other
    end was killed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read():
        return

    def read() -> None:
        while os.read(int(output), 65536):
            pass

    if output:
        threading.Thread(target=read, daemon=True).start()
    pairs = [one.split(":") for one in signals]
    stop(int(group), None, tuple((signal.Signals(int(number)), float(seconds)) for number, seconds in pairs))


if __name__ == "__main__":
    _main(*sys.argv[1:])
