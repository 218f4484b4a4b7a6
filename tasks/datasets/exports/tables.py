"""CSV and TSV files with a header, read strictly: UTF-8, and as many fields in every row as in the header."""

import csv
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row, brief, brief_names
from tasks.datasets.problems import Problems
from tasks.datasets.sources.shapes import ENDED, EXPECTED, LABEL_COLUMNS, shape_of

FLAGS = ("tie", *ENDED)
LABELS = ("annotator", "time", "task", *FLAGS)
"""Columns of a label; an empty field is no value."""
DELIMITERS = (",", "\t", ";")
TRUTH = {"true": True, "false": False}


def read(path: Path, problems: Problems) -> list[Row]:
    """The rows; further columns are texts. Rows that cannot be read are added to `problems`, with their line. Raises
    UserError for other bytes than UTF-8, and for a header without the columns of a row."""
    text = _decode(path)
    header, delimiter = _header(path, text)
    return list(_rows(path, text, header, delimiter, problems))


def _decode(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = len((content[: error.start] + b"?").splitlines())
        raise UserError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8") from None


def _header(path: Path, text: str) -> tuple[list[str], str]:
    """The names of the columns, and what separates them."""
    first = next(StringIO(text, newline=""), "").rstrip("\r\n")
    for delimiter in DELIMITERS:
        names = [name.strip() for name in _first_record(path, text, delimiter)]
        if shape_of(names):
            if len(set(names)) < len(names):
                raise UserError(f"{path}, line 1: two columns of one name ({brief_names(names)}); rename one of them")
            return names, delimiter
    raise UserError(f"{path}, line 1: no header that is understood ({brief(first)}); expected {EXPECTED}")


def _first_record(path: Path, text: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader(StringIO(text, newline=""), delimiter=delimiter), [])
    except csv.Error as error:
        raise UserError(f"{path}, line 1: broken CSV ({error}); correct the header") from None


def _rows(path: Path, text: str, header: list[str], delimiter: str, problems: Problems) -> Iterator[Row]:
    reader = csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        for number, fields in enumerate(reader):
            where, line = f"{path}, line {line}", reader.line_num + 1
            if not number or not fields:
                continue
            if len(fields) != len(header):
                problems.add(f"{where}: {len(fields)} fields, and the header has {len(header)}; correct the row")
                continue
            row = dict(zip(header, fields, strict=True))
            unclear = [name for name in FLAGS if row.get(name, "").strip().casefold() not in {"", *TRUTH}]
            if unclear:
                found = brief(row[unclear[0]])
                problems.add(f"{where}: {unclear[0]}: expected true, false or nothing, got {found}")
                continue
            yield _typed(row)
    except csv.Error as error:
        problems.add(f"{path}, line {line}: broken CSV ({error}); correct the row or remove it")


def _typed(row: Row) -> Row:
    """The typed columns; those of a label, and further ones, only where they have a value."""
    shape = shape_of(row)
    answers = {name: row[name] for name in shape}
    label = {name: row[name].strip() for name in LABELS if row.get(name, "").strip()}
    further = {name: value for name, value in row.items() if name and value and name not in shape + LABEL_COLUMNS}
    return answers | further | label | {name: TRUTH[label[name].casefold()] for name in FLAGS if name in label}
