"""Columns and checks of the schemas. Frames hold plain Python objects, so that values are checked as JSON has them: a
number is not text, and null is not a missing key."""

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pandas as pd
import pandera.pandas as pa

from rlhf_core.data.chat import prompt_id

ROLES = ("system", "user", "assistant")
SPLITS = ("train", "validation")


def _each(test: Callable[[Any], bool], rule: str, *, nullable: bool = False, required: bool = True) -> pa.Column:
    """A column whose every value passes a test, in one Python pass. null passes only a nullable one; a column that is
    not required is in all rows or in none."""

    def passes(column: pd.Series) -> pd.Series:
        return _flags((value is None and nullable) or test(value) for value in column)

    return pa.Column(object, pa.Check(passes, error=rule, ignore_na=False), nullable=True, required=required)


def _flags(values: Iterable[bool]) -> pd.Series:
    return pd.Series(list(values), dtype=bool)


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


def prompt() -> pa.Column:
    """The prompt: a conversation that ends with the user."""
    return _each(is_prompt, "must be a conversation of non-empty turns that ends with role user")


def identity() -> pa.Column:
    """The prompt's id; `matching_id` compares it with the prompt."""
    return _each(lambda value: isinstance(value, str) and len(value) == 16, "must be 16 hexadecimal digits")


def text(*, nullable: bool = False) -> pa.Column:
    """Text that is not blank."""
    return _each(is_text, "must be non-empty text", nullable=nullable)


def sampled_text() -> pa.Column:
    """A sampled answer: any text, also an empty one."""
    return _each(lambda value: isinstance(value, str), "must be text")


def token_ids(*, nullable: bool = False) -> pa.Column:
    """The tokens that a model sampled, the eos at the end included."""
    return _each(lambda value: isinstance(value, list) and all(map(is_count, value)), "must be a list of token ids",
                 nullable=nullable)  # fmt: skip


def number(*, nullable: bool = False) -> pa.Column:
    """A finite number."""
    return _each(is_number, "must be a finite number", nullable=nullable)


def count(*, nullable: bool = False, required: bool = True) -> pa.Column:
    """A whole number from 0."""
    return _each(is_count, "must be a whole number from 0", nullable=nullable, required=required)


def flag(*, required: bool = True) -> pa.Column:
    """True or false."""
    return _each(lambda value: isinstance(value, bool), "must be true or false", required=required)


def choice(*values: str) -> pa.Column:
    """One of a few words."""
    return _each(lambda value: isinstance(value, str) and value in values, f"must be {' or '.join(values)}")


def annotator() -> pa.Column:
    """The person who labelled a pair; null where there is none. Data without labels lack the column."""
    return _each(is_text, "must be non-empty text", nullable=True, required=False)


def extra() -> pa.Column:
    """The further columns of the user's data, one object a row. Data without them lack the column."""
    return _each(lambda value: isinstance(value, dict), "must be an object", required=False)


def scores() -> pa.Column:
    """Numbers by name: what a score was made from. Scores of the reward model alone lack the column."""
    return _each(lambda value: isinstance(value, dict) and all(map(is_number, value.values())),
                 "must be an object of finite numbers", required=False)  # fmt: skip


def split() -> pa.Column:
    """The part of a dataset: train or validation."""
    return choice(*SPLITS)


def matching_id() -> pa.Check:
    """The prompt_id of every row is that of its prompt."""

    def passes(frame: pd.DataFrame) -> pd.Series:
        return _flags(_belongs(*pair) for pair in zip(frame["prompt_id"], frame["prompt"], strict=True))

    return pa.Check(passes, error="prompt_id does not belong to prompt")


def _belongs(name: object, conversation: Any) -> bool:
    if not isinstance(name, str) or not isinstance(conversation, list):
        return True  # the columns' own checks report it
    try:
        return prompt_id(conversation) == name
    except (TypeError, KeyError):
        return True


def different_answers() -> pa.Check:
    """Chosen and rejected differ."""

    def passes(frame: pd.DataFrame) -> pd.Series:
        return _flags(a != b for a, b in zip(frame["chosen"], frame["rejected"], strict=True))

    return pa.Check(passes, error="chosen equals rejected")


def one_split_per_prompt() -> pa.Check:
    """No prompt is in train and in validation."""

    def passes(frame: pd.DataFrame) -> pd.Series:
        first: dict[Hashable, Hashable] = {}
        return _flags(first.setdefault(name, part) == part for name, part in _keys(frame, "prompt_id", "split"))

    return pa.Check(passes, error="prompt is in train and in validation")


def unique(*names: str) -> pa.Check:
    """No two rows agree in all of these columns, as far as the data have them."""

    def passes(frame: pd.DataFrame) -> pd.Series:
        seen: set[tuple[Hashable, ...]] = set()
        flags = []
        for key in _keys(frame, *(name for name in names if name in frame)):
            flags.append(key not in seen)
            seen.add(key)
        return _flags(flags)

    return pa.Check(passes, error=f"{' + '.join(names)} must occur once")


def _keys(frame: pd.DataFrame, *names: str) -> Iterable[tuple[Hashable, ...]]:
    """The columns zipped; values without a hash (a mistake that their columns report) as text."""
    columns = [[v if isinstance(v, Hashable) else repr(v) for v in frame[name]] for name in names]
    return zip(*columns, strict=True)


def schema(columns: dict[str, pa.Column], *checks: pa.Check, may_be_empty: bool = False) -> pa.DataFrameSchema:
    """A schema with the prompt, its id, these columns and no others."""
    every = {"prompt_id": identity(), "prompt": prompt(), **columns}
    checks = (matching_id(), *checks)
    return pa.DataFrameSchema(every, checks=list(checks), strict=True, metadata={"may_be_empty": may_be_empty})
