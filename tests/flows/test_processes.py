"""Groups of processes: live lines, time limits, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flows import processes
from rlhf_core.locks import FileLock, is_held

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
child.wait()
"""
DEAF = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
SLOW = "import time; print('slow', flush=True); time.sleep(60)"


def run(code: str, *arguments: str, on_line: Callable[[str], None] = print, timeout: float | None = None) -> int:
    command = [sys.executable, "-c", code, *arguments]
    return processes.run(command, cwd=Path.cwd(), env=dict(os.environ), on_line=on_line, timeout=timeout)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_lines_come_as_they_are_written_and_carriage_returns_end_them() -> None:
    heard: list[tuple[float, str]] = []
    code = "import sys, time; print('a\\rb', flush=True); time.sleep(1); sys.stderr.write('é'); sys.exit(3)"
    assert run(code, on_line=lambda line: heard.append((time.monotonic(), line))) == 3
    assert [line for _, line in heard] == ["a", "b", "é"]
    assert heard[2][0] - heard[1][0] > 0.5


def test_an_interrupted_command_can_print_and_close(tmp_path: Path) -> None:
    """More than a pipe holds, while it stops; nothing is lost."""
    code = (
        "import os, signal, sys, time\n"
        "def close(*_):\n"
        "    print('x' * 200_000, flush=True)\n"
        "    open(sys.argv[1], 'w').close()\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGINT, close)\n"
        "os.write(1, b'ready\\n')\n"  # a signal within print's own flush would make the handler's print fail
        "time.sleep(60)"
    )
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if line == "ready":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(code, str(tmp_path / "closed"), on_line=interrupt)
    assert (tmp_path / "closed").exists()
    assert [len(line) for line in lines[1:]] == [200_000]


def test_a_time_limit_ends_the_whole_group() -> None:
    lines: list[str] = []
    started = time.monotonic()
    with pytest.raises(processes.TimedOut, match="after 2 seconds"):
        run(PARENT, SLOW, on_line=lines.append, timeout=2.0)
    assert time.monotonic() - started < 10.0
    assert not alive(int(lines[0]))


def test_what_a_dead_leader_leaves_running_is_stopped() -> None:
    pids: list[int] = []

    def kill_leader(line: str) -> None:
        if line.isdigit():
            pids.append(int(line))
        else:
            os.kill(os.getpgid(pids[0]), signal.SIGKILL)

    assert run(PARENT, SLOW, on_line=kill_leader) == -signal.SIGKILL
    assert not alive(pids[0])


def test_stop_all_ends_the_deaf_too_and_lets_nothing_start(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = ((signal.SIGINT, 0.5), (signal.SIGTERM, 0.5), (signal.SIGKILL, 5.0))
    lines: list[str] = []
    ends: list[BaseException] = []

    def work() -> None:
        try:
            command = [sys.executable, "-c", PARENT, DEAF]
            processes.run(command, cwd=Path.cwd(), env=dict(os.environ), on_line=lines.append, signals=signals)
        except processes.Stopped as error:
            ends.append(error)

    with processes.session():
        worker = threading.Thread(target=work)
        worker.start()
        while "deaf" not in lines:
            time.sleep(0.05)
    worker.join(10.0)
    assert len(ends) == 1
    assert not alive(int(lines[0]))
    with pytest.raises(processes.Stopped):
        run("print('too late')")
    assert not processes._live.groups


def test_a_driver_that_ignores_sigint_has_children_that_receive_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines: list[str] = []
    try:
        with processes.session():
            run("import signal; print(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)", on_line=lines.append)
    finally:
        signal.signal(signal.SIGINT, before)
    assert lines == ["True"]


DRIVER = """
import os, pathlib, sys
from flows import processes
from rlhf_core.locks import FileLock, is_held
from rlhf_core.locks import FileLock

lock = FileLock(pathlib.Path(sys.argv[1]))
assert lock.acquire()
command = [sys.executable, "-c", sys.argv[2]]
with processes.keeping(lock.descriptor):
    processes.run(command, cwd=pathlib.Path.cwd(), env=dict(os.environ), on_line=lambda line: print(line, flush=True))
"""
CLOSES = """
import os, signal, sys, time
def close(number, frame):
    print("x" * 200_000, flush=True)  # more than a pipe holds
    time.sleep(1)
    open("closed", "w").close()
    sys.exit()
signal.signal(signal.SIGINT, close)
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_what_a_killed_driver_leaves_running_may_print_and_close_and_keeps_the_lock_meanwhile(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "lock"), CLOSES]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    driver = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert is_held(tmp_path / "lock")
    assert FileLock(tmp_path / "lock").acquire(30.0)
    assert (tmp_path / "closed").exists()
    assert not alive(pid)
