"""Advisory file locks between processes. The kernel releases a lock when its process ends, so that a lock file never
has to be removed."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

POLL_SECONDS = 0.02


class FileLock:
    """An exclusive lock on the file `path`, which contains the holder's process id. `acquire` returns False where the
    folder does not exist."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    @property
    def descriptor(self) -> int | None:
        """The file descriptor that holds the lock; a child process that inherits it holds the lock, too."""
        return self._fd

    def acquire(self, timeout: float = 0.0) -> bool:
        """Take the lock, waiting up to `timeout` seconds; False when another process still holds it."""
        deadline = time.monotonic() + timeout
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            return False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return False
                time.sleep(POLL_SECONDS)
            else:
                os.truncate(fd, 0)
                os.write(fd, str(os.getpid()).encode())
                self._fd = fd
                return True

    def release(self) -> None:
        """Release the lock, also for child processes that inherited it; does nothing when it is not held."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None


def is_held(path: Path) -> bool:
    """Whether a process holds the lock on `path`."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def holder(path: Path) -> int | None:
    """The process that holds, or last held, the lock on `path`; None where that cannot be read."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
