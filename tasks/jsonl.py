"""JSON lines, read with errors that name file and row, written with the same bytes for the same rows. What the rows
mean does not belong here (see `tasks/schemas/` and `tasks/sources/`).

The standard parser, line by line, on purpose: table readers guess types, and turn answers such as "42" or "2024-01-01"
into numbers and dates."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError

Row = dict[str, Any]


def read_jsonl(path: Path) -> list[Row]:
    """All rows of a UTF-8 JSONL file; blank lines are skipped.

    Raises UserError for a missing file, for bytes that are no UTF-8, and for a line that is no JSON object.
    """
    return [row for _, row in iter_jsonl(path)]


def iter_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows one after the other, each with its line number (from 1). Raises what `read_jsonl` raises."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                row = _parse(path, number, line)
                if row is not None:
                    yield number, row
    except FileNotFoundError:
        raise UserError(f"{path}: file not found") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, expected a JSONL file") from None


def _parse(path: Path, number: int, line: bytes) -> Row | None:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        if not text.strip():
            return None
        value = json.loads(text.rstrip())
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, row {number}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, row {number}: broken JSON ({error.msg}, column {error.pos + 1})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, row {number}: broken JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}, row {number}: expected a JSON object, got {type(value).__name__}")
    return value


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as UTF-8 JSON lines, keys in the order given. NaN and infinity are no JSON: ValueError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(encode(row) + "\n" for row in rows)
