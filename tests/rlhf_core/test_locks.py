"""File locks: between processes, and where a file cannot be locked."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core import locks
from rlhf_core.errors import UserError
from rlhf_core.locks import FileLock, held, is_held


def test_another_process_is_kept_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "work" / "a.lock"
    code = "import sys; from rlhf_core.locks import is_held, holder; from pathlib import Path as P; p = P(sys.argv[1])"
    with held(path, 0.0, "promotes"):
        printed = subprocess.run(
            [sys.executable, "-c", f"{code}; print(is_held(p), holder(p))", str(path)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert printed.split() == ["True", str(os.getpid())]
        with (
            pytest.raises(UserError, match=rf"process {os.getpid()} promotes; wait"),
            held(path, 0.0, "promotes"),
        ):
            pass
    assert not is_held(path)


def test_a_full_disk_leaves_no_lock_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock holds without its number, and is released."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.lock"
    with monkeypatch.context() as patch:
        patch.setattr(locks.os, "write", full)
        with held(path, 0.0, "works"):
            assert is_held(path)
    assert not is_held(path)


def refuse(*_: object) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@pytest.mark.parametrize("look", [lambda path: FileLock(path).acquire(), is_held])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: object) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(UserError, match=r"a\.lock: its file system has no file locks .*another disk"):
        look(path)  # type: ignore[operator]
    assert len(os.listdir("/proc/self/fd")) == before, "a file stays open"  # noqa: PTH208


@pytest.mark.parametrize("look", [lambda path: FileLock(path).acquire(), is_held])
def test_the_lock_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: object) -> None:
    path = tmp_path / "a.lock"
    path.touch()

    def deny(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(locks.os, "open", deny)  # tests may run as root, whom no mode keeps out
    with pytest.raises(UserError, match=r"a\.lock: Permission denied; it belongs to user \S+: remove it"):
        look(path)  # type: ignore[operator]
