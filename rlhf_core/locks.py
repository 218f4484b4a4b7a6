"""Advisory file locks between processes. The kernel releases a lock when its process ends, so that a lock file never
has to be removed."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.02


class FileLock:
    """An exclusive lock on the file `path`, which contains the holder's process id. `acquire` returns False where the
    folder does not exist. A `shared` lock file can be used by all users of the machine."""

    def __init__(self, path: Path, shared: bool = False) -> None:
        self._path = path
        self._shared = shared
        self._fd: int | None = None

    @property
    def descriptor(self) -> int | None:
        """The file descriptor that holds the lock; a child process that inherits it holds the lock, too."""
        return self._fd

    def acquire(self, timeout: float = 0.0) -> bool:
        """Take the lock, waiting up to `timeout` seconds; False when another process still holds it."""
        deadline = time.monotonic() + timeout
        try:
            fd = self._open_shared() if self._shared else os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
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

    def _open_shared(self) -> int:
        """Open the file without O_CREAT where it exists: in a folder such as /tmp the kernel refuses that for files of
        other users. A link is not followed."""
        with suppress(FileNotFoundError):
            return os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        with suppress(FileExistsError):
            fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(fd, 0o666)  # whatever the umask
            return fd
        return os.open(self._path, os.O_RDWR | os.O_NOFOLLOW)

    def release(self) -> None:
        """Release the lock, also for child processes that inherited it; does nothing when it is not held."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None


def is_held(path: Path) -> bool:
    """Whether a process holds the lock on `path`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # of another user: a link, a pipe
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise
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


def who_holds(path: Path) -> str:
    """The process that holds the lock, its user, its folder and its command; empty where nobody does."""
    import psutil

    if not is_held(path):
        return ""
    pid = holder(path)
    with suppress(psutil.Error, ValueError, TypeError):
        process = psutil.Process(pid)
        since = time.strftime("%H:%M", time.localtime(process.create_time()))
        words = [f"process {pid}", f"user {process.username()}", f"since {since}", " ".join(process.cmdline()[-2:])]
        with suppress(psutil.Error):  # of another user
            words.append(f"in {process.cwd()}")
        return ", ".join(words)
    return f"process {pid or '?'}"
