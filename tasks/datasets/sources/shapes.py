"""The usual row shapes of preference data, read from their columns and normalised to `Example`.

A file has one shape, fixed by its first row:

| columns | becomes |
|---|---|
| prompt, response (or completion) | demonstration |
| messages | demonstration; the last assistant turn is the response |
| prompt, chosen, rejected | pair |
| chosen, rejected as whole conversations | pair; what they share is the prompt |
| prompt | prompt |
| text, and none of the others | demonstration; `Example.cut` makes prompt and response of it |

Further columns are kept, as far as JSON can hold their values.

A prompt is text, a list of {role, content}, or a raw "Human: … Assistant:" transcript. A pair may also have the columns
of a label: annotator, time, order, tie, task, chosen_ended, rejected_ended."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from rlhf_core.data.chat import Conversation
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import LONE_SURROGATE, Row, brief, brief_names
from tasks.datasets.problems import Log, Problems, refuse
from tasks.datasets.sources import dialogues
from tasks.datasets.sources.dialogues import BrokenConversation, ShapeError
from tasks.datasets.sources.example import Example

COLUMNS = ("prompt", "response", "completion", "chosen", "rejected", "messages")
"""Columns that give a row its shape."""
TEXT = "text"
"""The column of a row that has none of them."""
ENDED = ("chosen_ended", "rejected_ended")
LABEL_COLUMNS = ("annotator", "time", "order", "tie", "task", *ENDED)
"""Columns that a pair may have: who labelled it, when, the places (from 1) at which chosen and rejected were shown,
whether neither is better, the task that it is a part of, and whether each answer ended."""
KNOWN = frozenset(COLUMNS)
KNOWN_OF_PAIRS = frozenset(COLUMNS + LABEL_COLUMNS)
KNOWN_OF_TEXTS = frozenset({TEXT})
EXPECTED = (
    "prompt + response, prompt + chosen + rejected, prompt, messages, chosen + rejected as conversations, or text"
)

Answers = tuple[Conversation, str | None, str | None, str | None]
"""Prompt, response, chosen, rejected."""


def read_columns(types: Mapping[str, str]) -> list[str]:
    """The columns to read of a table, given the name of the Arrow type of each column: all but further ones with bytes,
    such as images."""
    return [name for name, kind in types.items() if name in COLUMNS or "binary" not in kind]


def shape_of(row: Iterable[str]) -> tuple[str, ...]:
    """The columns of a row, or names of a header, that give it its shape; empty for a row of no known shape."""
    names = set(row)
    return tuple(name for name in COLUMNS if name in names) or ((TEXT,) if TEXT in names else ())


def _further(row: Row, known: frozenset[str]) -> dict[str, Any]:
    """The columns that are none of the known ones, without those whose value is null or cannot be written as JSON."""
    if known.issuperset(row):
        return {}
    further = {name: value for name, value in row.items() if name not in known and value is not None}
    try:
        return {name: value for name, value in further.items() if _is_json({name: value})}
    except RecursionError:  # nested too deeply
        return {}


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(key) and _is_json(part) for key, part in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, str):
        return not LONE_SURROGATE.search(value)
    return value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def normalise(rows: Iterable[tuple[int, Row]], file: str, *, heldout: bool, on_bad: Log = refuse) -> Iterator[Example]:
    """Numbered rows of one file as examples. For a row of another shape than the first, or with a value of the wrong
    type, `on_bad` is called with one line of text.

    Raises UserError, naming file, row and column, for a first row of no known shape, and for the first bad row unless
    `on_bad` is given.
    """
    first: tuple[int, tuple[str, ...]] | None = None
    read: Callable[[Row], Answers] | None = None
    for number, row in rows:
        columns = shape_of(row)
        if first is None or read is None:
            first, read = (number, columns), _reader(columns, row, f"{file}, row {number}")
        try:
            if columns != first[1]:
                _refuse_mixed(f"{file}, row {number}", columns, *first)
            example = _example(row, read, file, number, heldout)
        except UserError as error:
            on_bad(str(error))
            continue
        yield example


def read_all(
    rows: Iterable[tuple[int, Row]], file: str, place: str, problems: Problems, *, heldout: bool
) -> list[Example]:
    """The examples of the file at `place`, called `file`. What is wrong with it or its rows is added to `problems`."""
    before = problems.count
    examples: list[Example] = []
    try:
        for example in normalise(rows, file, heldout=heldout, on_bad=problems.add):
            examples.append(example)
    except UserError as error:
        problems.add(str(error))
    if not examples and problems.count == before:
        problems.add(f"{place}: no rows; fill the file or remove it")
    return examples


def _example(row: Row, read: Callable[[Row], Answers], file: str, number: int, heldout: bool) -> Example:
    try:
        annotator, tie, ended = _label(row) if read in (_pair, _whole_pair) else (None, False, None)
        prompt, response, chosen, rejected = read(row)
    except BrokenConversation:
        return Example(file, number, heldout, [], *NO_ANSWERS[read], broken=True)
    except ShapeError as error:
        raise UserError(f"{file}, row {number}: {error}") from None
    broken = bool(prompt) and not dialogues.is_prompt(prompt)
    is_text = read is _text
    known = KNOWN_OF_PAIRS if read in (_pair, _whole_pair) else KNOWN_OF_TEXTS if is_text else KNOWN
    extra = _further(row, known)
    answers = (response, chosen, rejected)
    return Example(file, number, heldout, prompt, *answers, broken, annotator, tie, ended, extra, is_text)


def _reader(columns: tuple[str, ...], row: Row, where: str) -> Callable[[Row], Answers]:
    found = set(columns)
    if found == {TEXT}:
        return _text
    if found & {"chosen", "rejected"}:
        for name in ("chosen", "rejected"):
            if name not in found:
                raise UserError(f"{where}: missing column {name} (found: {_names(row)})")
        if found & {"response", "completion"}:
            raise UserError(f"{where}: response beside chosen and rejected; keep them in files of their own")
        return _pair if "prompt" in found else _whole_pair
    if "messages" in found:
        return _messages
    if "prompt" not in found:
        raise UserError(f"{where}: missing column prompt (found: {_names(row)}); expected {EXPECTED}")
    if {"response", "completion"} <= found:
        raise UserError(f"{where}: both response and completion; keep one of them")
    return _demonstration if found & {"response", "completion"} else _prompt


def _refuse_mixed(where: str, columns: tuple[str, ...], first_row: int, first: tuple[str, ...]) -> NoReturn:
    missing = [name for name in first if name not in columns]
    extra = [name for name in columns if name not in first]
    problem = f"missing column {missing[0]}" if missing else f"column {extra[0]} is missing in row {first_row}"
    raise UserError(
        f"{where}: {problem} (row {first_row} has {', '.join(first)}); rows of another shape need a file of their own"
    )


def _text(row: Row) -> Answers:
    if not isinstance(row[TEXT], str | None):
        raise ShapeError(f"{TEXT}: expected text, got {type(row[TEXT]).__name__}")
    return [{"role": "user", "content": row[TEXT] or ""}], None, None, None


def _prompt(row: Row) -> Answers:
    return _column(row, "prompt"), None, None, None


def _demonstration(row: Row) -> Answers:
    prompt = _column(row, "prompt")
    name = "response" if "response" in row else "completion"
    return prompt, _reply(row, name, prompt), None, None


def _messages(row: Row) -> Answers:
    if not isinstance(row["messages"], list):
        raise ShapeError(f"messages: expected a list of messages, got {type(row['messages']).__name__}")
    return (*dialogues.split_reply(_column(row, "messages")), None, None)


def _pair(row: Row) -> Answers:
    prompt = _column(row, "prompt")
    return prompt, None, _reply(row, "chosen", prompt), _reply(row, "rejected", prompt)


def _whole_pair(row: Row) -> Answers:
    for name in ("chosen", "rejected"):
        if isinstance(row[name], str) and not dialogues.is_transcript(row[name]):
            raise ShapeError(f"missing column prompt ({name} is no whole conversation that would contain it)")
    prompt, chosen, rejected = dialogues.split_pair(_column(row, "chosen"), _column(row, "rejected"))
    return prompt, None, chosen, rejected


def _label(row: Row) -> tuple[str | None, bool, tuple[bool, bool] | None]:
    """The annotator of a pair, whether it is a tie, and whether chosen and rejected ended (None: not known). Raises
    ShapeError for a column of another type."""
    annotator, tie = row.get("annotator"), row.get("tie")
    if annotator is not None and not (isinstance(annotator, str) and annotator.strip() and annotator.isprintable()):
        raise ShapeError(f"annotator: expected a name, got {brief(annotator)}")
    for name in ("tie", *ENDED):
        if not isinstance(row.get(name), bool | None):
            raise ShapeError(f"{name}: expected true or false, got {brief(row[name])}")
    if annotator is not None:
        for name in ("time", "task"):
            if not isinstance(row.get(name), str | None):
                raise ShapeError(f"{name}: expected text, got {brief(row[name])}")
        if row.get("order") is not None and not _is_order(row["order"]):
            raise ShapeError(f"order: expected two different places from 1, got {brief(row['order'])}")
    chosen, rejected = (row.get(name) for name in ENDED)
    ended = None if chosen is None and rejected is None else (chosen is not False, rejected is not False)
    return annotator.strip() if annotator else None, bool(tie), ended


def _is_order(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or value[0] == value[1]:
        return False
    return all(isinstance(place, int) and not isinstance(place, bool) and place > 0 for place in value)


def _column(row: Row, name: str) -> Conversation:
    try:
        return dialogues.parse_conversation(row[name])
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None


def _reply(row: Row, name: str, prompt: Conversation) -> str:
    try:
        return dialogues.parse_reply(row[name], prompt, strip=dialogues.is_transcript(row["prompt"]))
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None


NO_ANSWERS: dict[Callable[[Row], Answers], tuple[str | None, str | None, str | None]] = {
    _prompt: (None, None, None),
    _text: (None, None, None),
    _demonstration: ("", None, None),
    _messages: ("", None, None),
    _pair: (None, "", ""),
    _whole_pair: (None, "", ""),
}
"""Empty answers of a broken conversation, by the kind of its row."""


def _names(row: Row) -> str:
    return brief_names(map(str, row)) or "nothing"
