"""CSV files and the exports of annotation tools as JSONL; a format is recognised by its content."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from rlhf_core.errors import UserError
from tasks.datasets.exports import argilla, label_studio, tables
from tasks.datasets.exports.judgements import Export, label_rows, question_of
from tasks.datasets.jsonl import Row, brief_names, iter_jsonl, write_jsonl
from tasks.datasets.problems import Log, Problems
from tasks.datasets.sources.files import data_files

TABLES = (".csv", ".tsv")
CONVERTED = (*TABLES, ".json")
"""Endings of files that are always converted."""
EXPECTED = "Label Studio's export in the format JSON (data, annotations) or Argilla's records (fields, responses)"

Reader = Callable[[Sequence[Mapping[str, Any]], str], Export]


class Converted(NamedTuple):
    """Data as JSONL and Parquet files."""

    place: Path
    originals: Mapping[Path, Path]
    """For each file that was converted, what it was made from."""


@contextmanager
def converted(source: Path, log: Log) -> Iterator[Converted]:
    """The data at `source` as JSONL and Parquet: `source` itself, or where it has files to convert a temporary copy of
    the same name with JSONL files in their place. `log` prints what was converted.

    Raises UserError for a file of another format, a row that cannot be read (several are printed), and two files that
    would become one.
    """
    rows = {path: found for path in data_files(source, also=CONVERTED) if (found := _convert(path, log)) is not None}
    if not rows:
        yield Converted(source, {})
        return
    with TemporaryDirectory() as folder:
        originals: dict[Path, Path] = {}
        target = Path(folder) / (source.name if source.is_dir() else f"{source.stem}.jsonl")
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            place = target / path.relative_to(source) if source.is_dir() else target
            if path in rows:
                place = place.with_suffix(".jsonl")
                originals[place] = path
            if path.is_file():
                _place(path, place, rows.get(path))
        yield Converted(target, originals)


def _place(path: Path, place: Path, rows: list[Row] | None) -> None:
    """Write the rows to `place`, or link a file that needs no conversion."""
    if place.exists():
        raise UserError(f"{path}: a second file that would become {place.name}; rename one of them")
    try:
        if rows is None:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path)
        else:
            write_jsonl(place, rows)
    except UnicodeEncodeError:
        raise UserError(f"{path}: half a surrogate pair in a text; correct the text or remove it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be converted in {place.parent} ({error.strerror or error})") from None


def _convert(path: Path, log: Log) -> list[Row] | None:
    """The rows of a file that is no JSONL or Parquet file of rows; None for one that is."""
    problems = Problems()
    name = f"{path.stem}.jsonl"
    if path.suffix.lower() in TABLES:
        rows, note = tables.read(path, problems), ""
        made = f"{path.name}: a table"
    else:
        records, reader = _records(path)
        if reader is None:
            return None
        export = reader(records, str(path))
        question = question_of(export.judgements, str(path)) if export.judgements else ""
        rows = list(label_rows(export.judgements, question, problems))
        note = f" (question: {brief_names([question])})" if question else ""
        note += "".join(f"; left out: {count} {reason}" for reason, count in sorted(export.left_out.items()))
        made = f"{path.name}: an export of {export.tool}, {len(records):,} records"
    problems.refuse(log)
    if not rows:
        raise UserError(f"{path}: no rows{note}; nothing to import")
    log(f"{made}, converted to {len(rows):,} rows of {name}{note}")
    return rows


def _records(path: Path) -> tuple[list[Any], Reader | None]:
    """The records of an annotation tool, and what reads them; no reader for rows of data. Raises UserError for a JSON
    file of another content."""
    if path.suffix.lower() == ".json":
        records = _load(path)
        first = records[0]
        if label_studio.is_export(first):
            return records, label_studio.read
        if argilla.is_export(first):
            return records, argilla.read
        found = brief_names(map(str, first)) or "nothing"
        raise UserError(
            f"{path}: not recognised (first record: {found}); expected {EXPECTED}, or rows in a .jsonl file"
        )
    try:
        if path.suffix.lower() == ".parquet":
            if argilla.is_export(dict.fromkeys(pyarrow.parquet.read_schema(path).names)):
                return pyarrow.parquet.read_table(path).to_pylist(), argilla.read
            return [], None
        first = next((row for _, row in iter_jsonl(path)), {})
    except (UserError, pyarrow.ArrowException, OSError):
        return [], None  # reported where the rows are read
    return ([row for _, row in iter_jsonl(path)], argilla.read) if argilla.is_export(first) else ([], None)


def _load(path: Path) -> list[dict[str, Any]]:
    """A JSON file that is a list of objects."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no valid JSON ({error}); expected {EXPECTED}, or rows in a .jsonl file") from None
    if not isinstance(content, list) or not content or not all(isinstance(one, dict) for one in content):
        raise UserError(f"{path}: expected a list of records: {EXPECTED}")
    return content
