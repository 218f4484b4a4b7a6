"""What a column of a dataset may hold. Frames hold plain Python objects, so that values are checked as JSON has them: a
number is not text, and null is not a missing key."""

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar

import pandas as pd
import pandera.pandas as pa
from pandera.extensions import register_check_method

from rlhf_core.data.chat import prompt_id

ROLES = ("system", "user", "assistant")


def is_text(value: object) -> bool:
    """Text with something in it."""
    return isinstance(value, str) and not value.isspace() and value != ""


def is_prompt(value: object) -> bool:
    """A conversation of {role, content} that ends with the user and has no empty turn."""
    if not isinstance(value, list) or not value:
        return False
    for turn in value:
        if not isinstance(turn, dict) or turn.keys() != {"role", "content"}:
            return False
        if turn["role"] not in ROLES or not is_text(turn["content"]):
            return False
    return bool(value[-1]["role"] == "user")


def is_number(value: object) -> bool:
    """A finite number; true and false are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object) -> bool:
    """A whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


KINDS: dict[str, Callable[[Any], bool]] = {
    "a conversation of non-empty turns that ends with role user": is_prompt,
    "16 hexadecimal digits": lambda value: isinstance(value, str) and len(value) == 16,
    "non-empty text": is_text,
    "text": lambda value: isinstance(value, str),
    "a list of token ids": lambda value: isinstance(value, list) and all(map(is_count, value)),
    "a finite number": is_number,
    "a whole number from 0": is_count,
    "true or false": lambda value: isinstance(value, bool),
    "train or validation": lambda value: isinstance(value, str) and value in ("train", "validation"),
    "judge or dataset": lambda value: isinstance(value, str) and value in ("judge", "dataset"),
    "an object": lambda value: isinstance(value, dict),
    "an object of finite numbers": lambda value: isinstance(value, dict) and all(map(is_number, value.values())),
}
"""What a value must be, in words, and its test."""


@register_check_method(statistics=["kind", "or_null"])  # type: ignore[untyped-decorator]
def holds(column: pd.Series, *, kind: str, or_null: bool) -> pd.Series:
    """pandera's check that every value is of a kind, or null."""
    test = KINDS[kind]
    return flags((value is None and or_null) or test(value) for value in column)


@register_check_method(statistics=["names"])  # type: ignore[untyped-decorator]
def unique_by(frame: pd.DataFrame, *, names: tuple[str, ...]) -> pd.Series:
    """pandera's check that no two rows agree in all of these columns, as far as the data have them."""
    seen: set[tuple[Hashable, ...]] = set()
    found = []
    for key in _keys(frame, *(name for name in names if name in frame)):
        found.append(key not in seen)
        seen.add(key)
    return flags(found)


def column(kind: str, description: str, *, or_null: bool = False, required: bool = True) -> Any:
    """A column of a model; one that is not required is in all rows or in none."""
    rule = {"kind": kind, "or_null": or_null}
    return pa.Field(
        holds=rule, description=description, nullable=True, ignore_na=False, required=required, metadata=rule
    )


def flags(values: Iterable[bool]) -> pd.Series:
    """One a row, as pandera's checks return them."""
    return pd.Series(list(values), dtype=bool)


class Prompts(pa.DataFrameModel):
    """Rows with a prompt."""

    prompt_id: object = column("16 hexadecimal digits", "Of the hash of the prompt")
    prompt: object = column(
        "a conversation of non-empty turns that ends with role user", "Turns, each with `role` and `content`"
    )

    class Config:
        strict = True
        metadata: ClassVar[dict[str, bool]] = {}
        """`may_be_empty`: a dataset without rows is valid."""

    @pa.dataframe_check(error="prompt_id does not belong to prompt")  # type: ignore[untyped-decorator]
    def matching_id(cls, frame: pd.DataFrame) -> pd.Series:
        """The prompt_id of every row is that of its prompt."""
        return flags(_belongs(*pair) for pair in zip(frame["prompt_id"], frame["prompt"], strict=True))


class Split(Prompts):
    """Rows of one part of a dataset."""

    split: object = column("train or validation", "A prompt is in one of them")

    @pa.dataframe_check(error="prompt is in train and in validation")  # type: ignore[untyped-decorator]
    def one_split_per_prompt(cls, frame: pd.DataFrame) -> pd.Series:
        """No prompt is in train and in validation."""
        first: dict[Hashable, Hashable] = {}
        return flags(first.setdefault(name, part) == part for name, part in _keys(frame, "prompt_id", "split"))


class Pairs(Split):
    """Rows with a better and a worse answer."""

    @pa.dataframe_check(error="chosen equals rejected")  # type: ignore[untyped-decorator]
    def different_answers(cls, frame: pd.DataFrame) -> pd.Series:
        """Chosen and rejected differ."""
        return flags(a != b for a, b in zip(frame["chosen"], frame["rejected"], strict=True))


def _belongs(name: object, conversation: Any) -> bool:
    if not isinstance(name, str) or not isinstance(conversation, list):
        return True  # the columns' own checks report it
    try:
        return prompt_id(conversation) == name
    except (TypeError, KeyError):
        return True


def _keys(frame: pd.DataFrame, *names: str) -> Iterable[tuple[Hashable, ...]]:
    """The columns zipped; values without a hash (a mistake that their columns report) as text."""
    columns = [[v if isinstance(v, Hashable) else repr(v) for v in frame[name]] for name in names]
    return zip(*columns, strict=True)
