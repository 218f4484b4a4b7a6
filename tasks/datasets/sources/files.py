"""JSONL and Parquet files below `data/raw/`: which files count, in what order, and their rows. What the columns mean
stands in `shapes.py`; how files get there in `tasks/datasets/importer.py`."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow
import pyarrow.parquet

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import HALF_PAIR, Row, iter_jsonl
from tasks.datasets.raw import below_raw
from tasks.datasets.sources.example import RAW, Example
from tasks.datasets.sources.shapes import COLUMNS, normalise
from tasks.params.ingest import FilesParams

SUFFIXES = (".jsonl", ".parquet")
UNREAD = (".json", ".csv", ".tsv", ".gz", ".bz2", ".xz", ".zst", ".zip", ".arrow", ".ndjson", ".xlsx")
"""Data that would be left out without a word: refused instead. Other files (licences, readmes) are ignored."""


def read(params: FilesParams, raw: Path = RAW) -> list[Example]:
    """All examples of `raw`/`params.path`, file after file in the order of their names.

    Raises UserError for a path that is missing or leads out of `raw`, a folder without data, an empty file, and as
    `read_rows` and `normalise` do.
    """
    place = below_raw(raw, params.path, "ingest.files.path")
    if not place.exists():
        pull = " (or `dvc pull`, its .dvc file is here)" if Path(f"{place}.dvc").exists() else ""
        raise UserError(f"{place}: not found; bring it in with `leash import PATH`{pull}")
    examples: list[Example] = []
    for path in data_files(place):
        name = (RAW / path.relative_to(raw)).as_posix()
        examples += read_file(path, name, heldout=is_heldout(path.name, params.heldout_files))
    if all(example.heldout for example in examples):
        patterns = ", ".join(params.heldout_files)
        raise UserError(f"{place}: ingest.files.heldout_files ({patterns}) holds out every file; nothing to train on")
    return examples


def read_file(path: Path, name: str, *, heldout: bool = False) -> Iterator[Example]:
    """The examples of one file, called `name` in messages. Raises UserError when it has no rows."""
    example = None
    for example in normalise(read_rows(path), name, heldout=heldout):
        yield example
    if example is None:
        raise UserError(f"{path}: no rows; fill the file or remove it")


def data_files(place: Path) -> list[Path]:
    """The file itself, or the data files of a folder and its folders, sorted; hidden ones do not count.

    Raises UserError when there is none, and for formats that Leash would have to leave out.
    """
    if place.is_file():
        found = [place]
    else:
        hidden = [path for path in place.rglob("*") if path.is_file()]
        found = sorted(p for p in hidden if not any(part.startswith(".") for part in p.relative_to(place).parts))
    for path in found:
        if HALF_PAIR.search(str(path)):
            raise UserError(f"{str(path)!r}: the name of this file is not UTF-8; rename it")
        if path.suffix.lower() in UNREAD:
            raise UserError(f"{path}: Leash reads *.jsonl and *.parquet; convert or unpack this file, or move it away")
    data = [path for path in found if path.suffix.lower() in SUFFIXES]
    if not data:
        raise UserError(f"{place}: no *.jsonl or *.parquet file")
    return data


def is_heldout(name: str, patterns: list[str]) -> bool:
    """Whether a file name matches one of the patterns; upper and lower case are the same."""
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Numbered rows of a JSONL or Parquet file. Raises UserError for a broken file."""
    return _read_parquet(path) if path.suffix.lower() == ".parquet" else iter_jsonl(path)


def _read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [name for name in names if name in COLUMNS] or names
            number = 0
            for batch in file.iter_batches(batch_size=10_000, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: no valid Parquet file ({reason}); copy it again, or make it again") from None
