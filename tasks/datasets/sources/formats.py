"""Files as numbered rows: JSON lines, JSON, CSV and Parquet; compressed ones, too."""

import bz2
import csv
import gzip
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import DECODER, DuplicateKey, Row, brief, brief_names, iter_jsonl
from tasks.datasets.problems import Log, refuse
from tasks.datasets.sources.dialogues import loaded
from tasks.datasets.sources.shapes import CONTENT, ENDED, LABEL_COLUMNS, read_columns
from tasks.datasets.sources.verdicts import ANSWER

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
TABLES = (".csv", ".tsv")
LINES = (".jsonl", ".ndjson", ".json")
SUFFIXES = (*LINES, *TABLES, ".parquet")
FLAGS = ("tie", *ENDED)
DELIMITERS = (",", "\t", ";")
TRUTH = {"true": True, "false": False}


def kind_of(path: Path) -> str:
    """The ending that says how a file is read, without that of its compression; empty for a file that is not read."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = len(suffixes) > 1 and suffixes[-1] in OPENERS
    kind = suffixes[-2] if packed else suffixes[-1] if suffixes else ""
    return kind if kind in SUFFIXES and not (packed and kind == ".parquet") else ""


def stem_of(path: Path) -> str:
    """The name of a data file without what says how it is read."""
    name = path.name[: -len(path.suffix)] if path.suffix.lower() in OPENERS else path.name
    return name[: -len(kind_of(path))]


def read_rows(path: Path, on_bad: Log = refuse) -> Iterator[tuple[int, Row]]:
    """The rows of a file with their numbers, from 1. `on_bad` is called with one line of text for a row that cannot be
    read. Raises UserError for a file that is missing or broken as a whole."""
    kind = kind_of(path)
    try:
        if kind == ".parquet":
            yield from _read_parquet(path)
        elif kind in TABLES:
            yield from _read_table(path, on_bad)
        else:
            yield from _read_json(path, on_bad)
    except FileNotFoundError:
        raise UserError(f"{path}: file not found") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, expected a file") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        why = getattr(error, "strerror", None)
        problem = f"cannot be read ({why})" if why else f"cannot be unpacked ({error}); copy it again"
        raise UserError(f"{path}: {problem}") from None


def _content(path: Path) -> bytes:
    with OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
        content: bytes = file.read()
    return content


def _read_json(path: Path, on_bad: Log) -> Iterator[tuple[int, Row]]:
    """JSON lines; or, where the first line is no whole object, a list of objects or objects over several lines."""
    opener = OPENERS.get(path.suffix.lower(), open)
    with opener(path, "rb") as file:
        lines = filter(None, (line.strip(b"\xef\xbb\xbf \t\r\n") for line in file))
        first, second = next(lines, b""), next(lines, b"")
    alone = kind_of(path) == ".json" and first.startswith(b"{") and not (second and first.endswith(b"}"))
    rows = _read_whole(path) if first == b"{" or first.startswith(b"[") or alone else None
    yield from iter_jsonl(path, on_bad=on_bad, opener=opener) if rows is None else enumerate(rows, start=1)


def _read_whole(path: Path) -> list[Row]:
    """The objects of a file of one JSON value, or of several one after the other."""
    try:
        text = _content(path).decode("utf-8-sig").strip()
        values, place = [], 0
        while place < len(text):
            value, place = DECODER.raw_decode(text, place)
            values.append(value)
            while text[place : place + 1].isspace():
                place += 1
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: broken JSON ({error.msg}, line {error.lineno}, column {error.colno}); correct it, or write one "
            "object in each line of a .jsonl file"
        ) from None
    except DuplicateKey as error:
        raise UserError(
            f"{path}: the key {brief(error.args[0])} occurs twice in one object; keep one of them"
        ) from None
    except (RecursionError, ValueError):
        raise UserError(
            f"{path}, row 1: broken JSON (lists or objects nested too deeply, or a number of thousands of digits); "
            "correct it"
        ) from None
    rows = values[0] if len(values) == 1 else values
    if isinstance(rows, dict):
        (name, inner), *others = rows.items() or [("", None)]
        columns = [value for value in rows.values() if isinstance(value, dict)]
        if not others and name not in CONTENT and isinstance(inner, list):  # {"data": [row, row, …]}
            rows = inner
        elif len(columns) == len(rows) and len({tuple(column) for column in columns}) == 1:  # pandas: columns of rows
            rows = [{name: column[row] for name, column in rows.items()} for row in columns[0]]
        else:
            rows = [rows]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path}, row {number}: expected a JSON object, got {type(row).__name__}")
    return list(rows)


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


def _read_table(path: Path, on_bad: Log) -> Iterator[tuple[int, Row]]:
    """CSV with a header, read strictly: UTF-8, and as many fields in every row as in the header. Fields are texts;
    those of a label and further ones only where they are not empty."""
    content = _content(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = len((content[: error.start] + b"?").splitlines())
        raise UserError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    csv.field_size_limit(sys.maxsize)
    delimiters = DELIMITERS if kind_of(path) == ".csv" else ("\t", ",", ";")  # the first of equals is taken
    delimiter = max(delimiters, key=next(StringIO(text, newline=""), "").count)
    reader = csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
    line, number = 1, 0
    header: list[str] = []
    try:
        for fields in reader:
            where, line = f"{path}, line {line}", reader.line_num + 1
            if not header:
                header = [name.strip() for name in fields]
                if len(set(header)) < len(header):
                    raise UserError(f"{where}: two columns of one name ({brief_names(header)}); rename one of them")
            elif fields:
                number += 1
                if len(fields) != len(header):
                    on_bad(f"{where}: {len(fields)} fields, and the header has {len(header)}; correct the row")
                    continue
                row = dict(zip(header, fields, strict=True))
                if header[0] and row.get(""):
                    on_bad(f"{where}: {brief(row[''])} is in a column without a name; name it in the header")
                    continue
                unclear = [name for name in FLAGS if row.get(name, "").strip().casefold() not in {"", *TRUTH}]
                if unclear:
                    on_bad(f"{where}: {unclear[0]}: expected true, false or nothing, got {brief(row[unclear[0]])}")
                    continue
                yield number, _typed(row)
    except csv.Error as error:
        kind = kind_of(path)[1:].upper()
        problem = (
            str(error)
            if "expected after" not in str(error)
            else ("a field that begins with a quote must end with one, and quotes in it are doubled")
        )
        on_bad(f"{path}, line {line}: broken {kind} ({problem}); correct the row or remove it")


def _typed(row: dict[str, str]) -> Row:
    row.pop("", None)  # the index that pandas writes, or an empty column
    content = {name for name in row if name in CONTENT or ANSWER.fullmatch(name)}
    typed: Row = {
        name: text if name in content else (loaded(text) if text.startswith("[{") else text or None)
        for name, text in row.items()
    }
    label = {name: row[name].strip() or None for name in LABEL_COLUMNS if name in row}
    flags = {name: TRUTH.get((label[name] or "").casefold()) for name in FLAGS if name in label}
    return typed | label | flags
