"""JSON lines: read with errors that name file and row, written with the same bytes for the same rows.

The standard parser is used because table readers guess types: "42" or "2024-01-01" would become a number or a date."""

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from sys import intern
from typing import Any

from rlhf_core.errors import UserError
from tasks.datasets.problems import Log, refuse

Row = dict[str, Any]

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair: JSON can escape it, and file names contain it in place of bytes that are not UTF-8."""
SHORT = 10
"""Longest text, in characters, that is interned: roles, splits."""
SHOWN = 60
"""Characters of a value, and names of columns, that a message shows at most."""


def read_jsonl(path: Path) -> list[Row]:
    """All rows of a UTF-8 JSONL file that a stage wrote; blank lines are skipped.

    Raises UserError for a missing file, for bytes that are not UTF-8, for a line that is not a JSON object or has a key
    twice, and for half a surrogate pair, which no tokenizer can read.
    """
    return [row for _, row in iter_jsonl(path, allow_halves=False)]


def iter_jsonl(
    path: Path, allow_halves: bool = True, on_bad: Log = refuse, opener: Callable[..., Any] = open
) -> Iterator[tuple[int, Row]]:
    """The rows with their line numbers (from 1). For a row that cannot be read, `on_bad` is called with one line of
    text, and the next row follows. `opener`: such as `gzip.open`, for a compressed file.

    Raises UserError for a missing file, and for the first bad row unless `on_bad` is given.
    """
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = _parse(path, number, line)
                    if row is not None and not allow_halves:
                        _refuse_half_pairs(path, number, line, row)
                except UserError as error:
                    on_bad(str(error))
                    continue
                if row is not None:
                    yield number, row
    except FileNotFoundError:
        raise UserError(f"{path}: file not found") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, expected a JSONL file") from None


def _refuse_half_pairs(path: Path, number: int, line: bytes, row: Row) -> None:
    if b"\\u" in line and LONE_SURROGATE.search(json.dumps(row, ensure_ascii=False)):
        raise UserError(f"{path}, row {number}: half a surrogate pair in a text; correct the row or remove it")


class DuplicateKey(ValueError):
    """An object has this key twice."""


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """An object with interned keys and short texts: a million rows share a few of them."""
    row = {intern(key): intern(value) if type(value) is str and len(value) <= SHORT else value for key, value in pairs}
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKey(next(key for key in keys if keys.count(key) > 1))
    return row


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _parse(path: Path, number: int, line: bytes) -> Row | None:
    where, repair = f"{path}, row {number}", "correct the row or remove it"
    if not line.endswith(b"\n"):
        repair = "the file ends here, in mid-row? Copy it again, or remove the row"
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        if not text.strip():
            return None
        value = DECODER.decode(text.rstrip())
    except UnicodeDecodeError as error:
        form = ", perhaps UTF-16" if line.startswith((b"\xff\xfe", b"\xfe\xff")) else ""
        raise UserError(f"{where}: not UTF-8 ({error.reason}{form}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: broken JSON ({error.msg}, column {error.pos + 1}); {repair}") from None
    except DuplicateKey as error:
        raise UserError(
            f"{where}: the key {brief(error.args[0])} occurs twice in one object; keep one of them"
        ) from None
    except RecursionError:
        raise UserError(
            f"{where}: broken JSON (lists or objects nested too deeply); correct the row or remove it"
        ) from None
    except ValueError:
        raise UserError(
            f"{where}: broken JSON (a number of thousands of digits); correct the row or remove it"
        ) from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(value).__name__}; each line must be one {{...}}")
    return value


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = SHOWN


def brief(value: object) -> str:
    """A value of the user's for a message: one short line without control characters."""
    return _BRIEF.repr(value)


def brief_names(names: Iterable[str]) -> str:
    """Names of columns for a message, the first ones of very many."""
    listed = [brief(name)[1:-1] for name in names]
    return ", ".join(listed[:SHOWN]) + (", …" if len(listed) > SHOWN else "")


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as UTF-8 JSON lines, keys in the order given. NaN and infinity are no JSON: ValueError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(encode(row) + "\n" for row in rows)
