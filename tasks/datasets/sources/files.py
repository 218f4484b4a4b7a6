"""JSONL and Parquet files below `data/raw/`: which files count, in what order, and their rows."""

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow
import pyarrow.parquet

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import LONE_SURROGATE, Row, brief_names, iter_jsonl
from tasks.datasets.problems import Log, Problems, refuse
from tasks.datasets.raw import below_raw
from tasks.datasets.sources.example import RAW, Example
from tasks.datasets.sources.shapes import read_all, read_columns
from tasks.params.ingest import FilesParams

SUFFIXES = (".jsonl", ".parquet")
UNREAD = (".json", ".csv", ".tsv", ".gz", ".bz2", ".xz", ".zst", ".zip", ".arrow", ".ndjson", ".xlsx")
"""Formats of data that Leash does not read: refused. Other files (licences, readmes) are ignored."""


def read(params: FilesParams, raw: Path = RAW, log: Log = print, key: str = "ingest.files.path") -> list[Example]:
    """All examples of `raw`/`params.path`, file after file in the order of their names. `key`: the parameter that names
    the path, for messages.

    Raises UserError for a path that is missing or leads out of `raw`, a folder without data, data that are all held
    out, and for files and rows that cannot be read: several are printed by `log`.
    """
    place = below_raw(raw, params.path, key)
    if not place.exists():
        raise UserError(_missing(place, raw, key))
    examples = read_files({path: (RAW / path.relative_to(raw)).as_posix() for path in data_files(place)}, params, log)
    if all(example.heldout for example in examples):
        patterns = ", ".join(params.heldout_files)
        raise UserError(f"{place}: ingest.files.heldout_files ({patterns}) holds out every file; nothing to train on")
    return examples


def read_files(names: Mapping[Path, str], params: FilesParams, log: Log) -> list[Example]:
    """All examples of these files, called by their names in messages. Raises UserError for what cannot be read."""
    problems = Problems()
    examples: list[Example] = []
    for path, name in names.items():
        heldout = is_heldout(path.name, params.heldout_files)
        examples += read_all(read_rows(path, problems.add), name, str(path), problems, heldout=heldout)
    problems.refuse(log)
    return examples


def _missing(place: Path, raw: Path, key: str) -> str:
    """The message for a missing `place`: what `raw` has, and what to do."""
    if Path(f"{place}.dvc").exists():
        return f"{place}: not found, but its .dvc file is there; get the data by `dvc pull`"
    names = sorted(path.name for path in raw.iterdir() if not path.name.startswith(".")) if raw.is_dir() else []
    found = [name for name in names if not name.endswith((".dvc", ".md"))]
    there = f"has {brief_names(found)}" if found else "is empty"
    return f"{place}: not found; {raw} {there}. Set {key} to a name in it, or import the data with `leash import PATH`"


def data_files(place: Path, also: Collection[str] = ()) -> list[Path]:
    """The file itself, or the data files of a folder and its folders, sorted; hidden ones do not count. `also`: endings
    of data files besides *.jsonl and *.parquet.

    Raises UserError when there is none, and for data in a format that Leash does not read.
    """
    if place.is_file():
        found = [place]
    else:
        hidden = [path for path in place.rglob("*") if path.is_file()]
        found = sorted(p for p in hidden if not any(part.startswith(".") for part in p.relative_to(place).parts))
    for path in found:
        if LONE_SURROGATE.search(str(path)):
            raise UserError(f"{str(path)!r}: the name of this file is not UTF-8; rename it")
        if path.suffix.lower() in UNREAD and path.suffix.lower() not in also:
            raise UserError(
                f"{path}: Leash reads *.jsonl and *.parquet; convert this file (`leash import` reads CSV, TSV and "
                "exports of annotation tools), unpack it, or move it away"
            )
    data = [path for path in found if path.suffix.lower() in (*SUFFIXES, *also)]
    if not data:
        raise UserError(f"{place}: no *.jsonl or *.parquet file")
    return data


def is_heldout(name: str, patterns: list[str]) -> bool:
    """Whether a file name matches one of the patterns; upper and lower case are the same."""
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)


def read_rows(path: Path, on_bad: Log = refuse) -> Iterator[tuple[int, Row]]:
    """Numbered rows of a JSONL or Parquet file; `on_bad` is called for rows that are not JSON. Raises UserError for a
    broken file."""
    return _read_parquet(path) if path.suffix.lower() == ".parquet" else iter_jsonl(path, on_bad=on_bad)


def _read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number, wanted = 0, read_columns({field.name: str(field.type) for field in file.schema_arrow})
            for batch in file.iter_batches(batch_size=10_000, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: no valid Parquet file ({reason}); copy it again, or make it again") from None
