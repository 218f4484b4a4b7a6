"""What `leash import PATH` does: check a data set, copy it to data/raw/, and put it under DVC. What its columns mean
stands in `tasks/datasets/sources/shapes.py`; the command line in `flows/`."""

import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_core.errors import UserError
from rlhf_core.files import remove
from tasks.datasets.sources.example import RAW
from tasks.datasets.sources.files import data_files, read_file

PAPERS = ("licen", "copying", "notice", "readme", "citation")
"""Beginnings of the names of files and folders that travel with the data."""


def import_data(source: Path, root: Path, force: bool = False) -> Path:
    """Bring a JSONL or Parquet file, or a folder of them, to `root`/data/raw/<name> and run `dvc add`.

    Every row is parsed before anything is copied, and the copy appears whole or not at all. Returns the new path; its
    name is what `ingest.files.path` in params.yaml must say. Raises UserError for a missing source, a row that cannot
    be read (file and row), other data of the same name without `force`, no room, and a failing `dvc add`.
    """
    source = source.expanduser().resolve()
    if not source.exists():
        raise UserError(f"{source}: file not found")
    if not (root / ".dvc").is_dir():
        raise UserError(f"{root}: not a DVC repository; run this in a clone of the project")
    target = (root / RAW).resolve() / source.name
    for path in data_files(source):
        for _ in read_file(path, str(path)):
            pass
    if source != target:
        _refuse_overlap(source, target)
        files = _files_to_copy(source)
        if not _equal(files, source, target):
            if target.exists() and not force:
                raise UserError(f"{target}: holds other data; use --force to replace them, or rename the source")
            with _replaced(target, files, source):
                _dvc_add(target, root)
            return target
    _dvc_add(target, root)
    return target


def _refuse_overlap(source: Path, target: Path) -> None:
    if source.name.startswith(".") or target in source.parents or source in target.parents:
        name = RAW / source.name
        raise UserError(f"{source}: cannot become {name}; put the data into a folder with a name of its own first")


def _files_to_copy(source: Path) -> list[Path]:
    """Data files, licences and readmes, relative to `source`; a source that is a file is the path "."."""
    if source.is_file():
        return [Path()]
    data = set(data_files(source))
    papers = {path for path in source.rglob("*") if path.is_file() and _is_paper(path.relative_to(source))}
    return sorted(path.relative_to(source) for path in data | papers)


def _is_paper(path: Path) -> bool:
    return any(part.lower().startswith(PAPERS) for part in path.parts)


def _equal(files: list[Path], source: Path, target: Path) -> bool:
    """Whether the target holds exactly the files that would be copied, byte for byte."""
    if not target.exists():
        return False
    if source.is_file() or target.is_file():
        return source.is_file() and target.is_file() and filecmp.cmp(source, target, shallow=False)
    present = sorted(path.relative_to(target) for path in target.rglob("*") if path.is_file())
    return present == files and all(filecmp.cmp(source / f, target / f, shallow=False) for f in files)


@contextmanager
def _replaced(target: Path, files: list[Path], source: Path) -> Iterator[None]:
    """A copy in the target's place; when the copy or the block fails, what was there before is there again.

    Until then it stands beside data/raw/, which the stage `ingest` depends on as a whole.
    """
    beside = target.parent.parent / f".import.{os.getpid()}"
    fresh, old = beside / "new", beside / "old"
    had_target = target.exists()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for file in files:
            (fresh / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / file, fresh / file)
        if had_target:
            target.replace(old)
        fresh.replace(target)
        yield
    except OSError as error:
        _restore(target, old, had_target)
        raise UserError(f"{target}: cannot copy the data there ({error.strerror or error})") from None
    except BaseException:
        _restore(target, old, had_target)
        raise
    else:
        remove(old)
    finally:
        remove(fresh)
        with suppress(OSError):
            beside.rmdir()


def _restore(target: Path, old: Path, had_target: bool) -> None:
    if old.exists():
        remove(target)
        old.replace(target)
    elif not had_target:
        remove(target)


def _dvc_add(target: Path, root: Path) -> None:
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "add", "--quiet", str(target)]
    environment = os.environ | {"DVC_NO_ANALYTICS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UserError(f"{target}: dvc add failed ({lines[0].removeprefix('ERROR: ')}); nothing was changed")
