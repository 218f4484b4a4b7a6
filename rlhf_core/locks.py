"""Advisory file locks between processes. The kernel releases a lock when its process ends, so that a lock file never
has to be removed."""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_core.errors import UserError

POLL_SECONDS = 0.02


class LockError(UserError, OSError):
    """The file cannot be locked: its file system has no locks, or it is another user's. Also an OSError, for callers
    that go on without a lock."""


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
        """Take the lock, waiting up to `timeout` seconds; False when another process still holds it. Raises LockError
        where the file cannot be locked."""
        deadline = time.monotonic() + timeout
        try:
            fd = self._open_shared() if self._shared else os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            return False
        except PermissionError as error:
            raise LockError(_refusal(self._path, error)) from None
        try:
            while not _try(fd, fcntl.LOCK_EX, self._path):
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return False
                time.sleep(POLL_SECONDS)
        except LockError:
            os.close(fd)
            raise
        self._fd = fd
        with suppress(OSError):  # a full disk: the lock holds without the number, which is for messages
            os.truncate(fd, 0)
            os.write(fd, str(os.getpid()).encode())
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


@contextmanager
def held(path: Path, timeout: float, doing: str) -> Iterator[FileLock]:
    """Hold the lock on `path` within the block; its folder is made. Raises UserError after `timeout` seconds, with what
    the other process is `doing`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    if not lock.acquire(timeout):
        raise UserError(f"process {holder(path) or '?'} {doing}; wait for its end or stop it")
    try:
        yield lock
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether a process holds the lock on `path`. Raises LockError where the file cannot be locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # of another user: a link, a pipe
    except FileNotFoundError:
        return False
    except PermissionError as error:
        raise LockError(_refusal(path, error)) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise
    try:
        return not _try(fd, fcntl.LOCK_SH, path)
    finally:
        os.close(fd)


def _try(fd: int, kind: int, path: Path) -> bool:
    """Lock the open file, unless another process holds it. Raises LockError where its file system has no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LockError(_refusal(path, error)) from None
    return True


def _refusal(path: Path, error: OSError) -> str:
    reason = os.strerror(error.errno or 0)
    if not isinstance(error, PermissionError):
        return f"{path}: its file system has no file locks ({reason}); use another disk, or mount this one with locks"
    with suppress(OSError):
        return (
            f"{path}: {reason}; it belongs to user {_user(path.stat().st_uid)}: remove it, or use a clone of your own"
        )
    return f"{path}: {reason}; make its folder writable, or use a clone of your own"


def _user(number: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)


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
