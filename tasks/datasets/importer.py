"""`leash import PATH`: check a data set, copy it to data/raw/, and put it under DVC."""

import filecmp
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path

from rlhf_core.errors import UserError
from rlhf_core.files import remove
from tasks.datasets.exports.convert import converted
from tasks.datasets.jsonl import brief_names
from tasks.datasets.problems import Log
from tasks.datasets.sources import cleaning
from tasks.datasets.sources.example import RAW, Example
from tasks.datasets.sources.files import data_files, read_files, read_rows
from tasks.datasets.sources.shapes import LABEL_COLUMNS, shape_of
from tasks.params.ingest import FilesParams, IngestParams

DOCUMENTS = ("licen", "copying", "notice", "readme", "citation")
"""Beginnings of the names of files and folders that are copied with the data."""

SCANNED = 10_000
"""Rows of a file whose columns are printed."""


def import_data(source: Path, root: Path, force: bool = False, log: Log = print) -> Path:
    """Copy a JSONL or Parquet file, or a folder of them, to `root`/data/raw/<name> and run `dvc add`. CSV files and
    exports of Label Studio and Argilla are converted to JSONL. Returns the new path. `log` prints what was found, and
    the parameters to set.

    Every row is read before anything is copied, and the copy is complete or absent. Raises UserError for a missing
    source, rows that cannot be read (file and row), other data of the same name without `force`, a full disk, and a
    failing `dvc add`.
    """
    source = source.expanduser().resolve()
    if not source.exists():
        raise UserError(f"{source}: file not found")
    if not (root / ".dvc").is_dir():
        raise UserError(f"{root}: not a DVC repository; run this in a clone of the project")
    with converted(source, log) as (data, originals):
        target = (root / RAW).resolve() / data.name
        if source != target:
            _refuse_overlap(source, target)
        elif data != source:
            raise UserError(f"{source}: has files to convert; move the folder out of {RAW} and import it from there")
        examples, found = describe(data, source, originals, log)
        _place(data, target, root, force)
    for line in found:
        log(line)
    place = (RAW / target.name).as_posix()
    log(f"{place}: {'converted and ' if data != source else ''}tracked by DVC (for git: {place}.dvc)")
    log("set in params.yaml (examples/own-data.yaml is a complete file to start from):")
    if any(example.annotator for example in examples) and all(example.kind == "pair" for example in examples):
        log(f"  ingest.labels: {json.dumps(target.name)}    (added to the data of ingest.source)")
        log("or, where these labels are all of the data:")
    log("  ingest.source: files")
    log(f"  ingest.files.path: {json.dumps(target.name)}")
    return target


def describe(data: Path, source: Path, originals: Mapping[Path, Path], log: Log) -> tuple[list[Example], list[str]]:
    """The examples; what the files hold, a line for each; and which rows `ingest` would leave out or refuse.
    `originals`: what converted files were made from. Raises UserError for rows that cannot be read, called by their
    place in `source`; `log` lists them before."""
    files = FilesParams(path="data")
    names: dict[Path, str] = {}
    called: dict[Path, str] = {}
    for path in data_files(data):
        name = path.relative_to(data if data.is_dir() else data.parent).as_posix()
        original = source / name if source.is_dir() else source
        place = path if path in originals else original
        names[place] = name
        called[place] = f"{originals[path]} (converted to JSONL)" if path in originals else str(original)
    words = IngestParams.model_fields["opening_words"].default
    whole = read_files(called, files, log)
    examples = [example.cut(words) for example in whole]
    by_file = {path: list(found) for path, found in groupby(examples, key=attrgetter("file"))}
    lines = [_file_line(path, name, by_file[called[path]]) for path, name in names.items()]
    if any(example.is_text for example in whole):
        lines.append(f"texts: the first {words} words are the prompt (ingest.opening_words); set base.format: text")
    short = {called[path]: name for path, name in names.items()}
    for example in examples:
        example.file = short[example.file]
    kept, dropped = cleaning.clean(examples, IngestParams.model_fields["max_characters"].default)
    if dropped:
        summary = cleaning.list_bad_rows(dropped, lines.append)
        lines.append(f"{len(dropped)} rows that ingest leaves out (ingest.on_bad_row: refuse stops instead): {summary}")
    if leaks := cleaning.find_leaks(kept):
        lines.append(cleaning.list_leaks(leaks, lines.append))
    if not any(example.kind == "pair" and not example.heldout for example in examples):
        lines.append(
            "no pairs (prompt, chosen, rejected): a reward model needs them, or ratings (ingest.rating_column)"
        )
    return examples, lines


def _file_line(path: Path, name: str, examples: list[Example]) -> str:
    """Rows by kind, the columns of the first rows, the further ones by themselves, and whether the file is held
    out."""
    found = dict.fromkeys(column for _, row in islice(read_rows(path), SCANNED) for column in row)
    known = shape_of(map(str, found)) + (LABEL_COLUMNS if examples[0].kind == "pair" else ())
    read = [column for column in known if column in found]
    further = [str(column) for column in found if column not in known]
    kinds = Counter(example.kind for example in examples)
    rows = ", ".join(f"{count:,} {kind}{'s' * (count != 1)}" for kind, count in kinds.items())
    heldout = ", held out (ingest.files.heldout_files)" if examples[0].heldout else ""
    extra = f"; kept for reward functions: {brief_names(further)}" if further else ""
    return f"{name}: {rows}{heldout}; columns: {', '.join(read)}{extra}"


def _place(source: Path, target: Path, root: Path, force: bool) -> None:
    """Copy the data to `target`, unless they are there, and run `dvc add`."""
    if source != target:
        files = _files_to_copy(source)
        if not _equal(files, source, target):
            if target.exists() and not force:
                raise UserError(f"{target}: holds other data; use --force to replace them, or rename the source")
            with _replaced(target, files, source):
                dvc_add(target, root)
            return
    dvc_add(target, root)


def _refuse_overlap(source: Path, target: Path) -> None:
    if source.name.startswith(".") or target in source.parents or source in target.parents:
        name = RAW / source.name
        raise UserError(f"{source}: cannot become {name}; put the data into a folder with a name of its own first")


def _files_to_copy(source: Path) -> list[Path]:
    """Data files, licences and readmes, relative to `source`; a source that is a file is the path "."."""
    if source.is_file():
        return [Path()]
    below = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    documents = {path for path in below if any(part.lower().startswith(DOCUMENTS) for part in path.parts)}
    return sorted(documents | {path.relative_to(source) for path in data_files(source)})


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
    """Replace the target by a copy; when the copy or the block fails, the old target is put back.

    The copy is made outside data/raw/, because stages depend on all of that folder.
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


def dvc_add(target: Path, root: Path) -> None:
    """Put a file or folder of the project at `root` under DVC. Raises UserError with DVC's error."""
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "add", "--quiet", str(target)]
    environment = os.environ | {"DVC_NO_ANALYTICS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UserError(f"{target}: dvc add failed ({lines[0].removeprefix('ERROR: ')}); nothing was changed")
