"""The one place through which whatever must survive a power cut reaches the disk: flushed first, renamed into place
afterwards. What the files hold does not belong here."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """The place to write the file or folder `path` to; when the block ends well, it stands at `path`, flushed to the
    disk. When it does not, `path` is as before and nothing is left beside it; after a kill, `.<name>.partial` is."""
    partial = beside(path)
    remove(partial)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        flush(partial)
        replace(partial, path)
    except BaseException:
        remove(partial)
        raise


def beside(path: Path) -> Path:
    """Where `path` is written until it is whole: in the same folder, so that renaming is all there is left to do."""
    return path.with_name(f".{path.name}.partial")


def flush(path: Path) -> None:
    """Wait until a file, or a folder with everything in it, is on the disk. Raises OSError where the disk is full."""
    below = sorted(path.rglob("*"), reverse=True) if path.is_dir() else []
    for place in [*below, path]:
        _fsync(place)


def replace(source: Path, target: Path) -> None:
    """Rename `source` to `target`, whatever stood there, and wait until the disk knows. A folder in the way is removed
    first: nobody can rename onto it."""
    if target.is_dir() or source.is_dir():
        remove(target)
    source.replace(target)
    flush_entry(target)


def flush_entry(path: Path) -> None:
    """Wait until the disk knows that there is something of this name."""
    _fsync(path.parent)


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file and wait until it is on the disk; a kill may leave the beginning of `data`."""
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


def _fsync(path: Path) -> None:
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
