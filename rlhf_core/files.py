"""Files and folders that survive a power cut: written to a temporary path, flushed to the disk, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path for the file or folder `path`, which is renamed to `path` when the block ends. When the block
    raises, `path` is unchanged and the temporary file is removed; a kill leaves `.<name>.partial`."""
    partial = partial_path(path)
    remove(partial)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        flush(partial)
        replace(partial, path)
    except BaseException:
        remove(partial)
        raise


def partial_path(path: Path) -> Path:
    """The temporary path of `path`: in the same folder, because a rename is atomic only within a file system."""
    return path.with_name(f".{path.name}.partial")


def flush(path: Path) -> None:
    """Wait until a file, or a folder with everything in it, is on the disk. Raises OSError where the disk is full."""
    below = sorted(path.rglob("*"), reverse=True) if path.is_dir() else []
    for place in [*below, path]:
        _fsync(place)


def replace(source: Path, target: Path) -> None:
    """Rename `source` to `target`, and flush the rename to the disk. A folder at `target` is removed first, because a
    rename cannot replace it."""
    if target.is_dir() or source.is_dir():
        remove(target)
    source.replace(target)
    flush_entry(target)


def flush_entry(path: Path) -> None:
    """Flush the folder that contains `path`, so that a new name survives a power cut."""
    _fsync(path.parent)


def append(path: Path, data: bytes) -> None:
    """Append to a file and flush it to the disk; a kill may leave the beginning of `data`."""
    with path.open("ab") as file:
        file.write(data)
    _fsync(path)
    flush_entry(path)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, or make a copy where the file system has no hard links. Neither may be written to
    afterwards, only replaced."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _fsync(path: Path) -> None:
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
