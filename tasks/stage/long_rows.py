"""Rows of a dataset as token ids, with one rule for those that do not fit: refused with their row, or dropped and
counted."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.tokenizer import encode_prompt
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row
from tasks.stage.stage import Stage

Item = TypeVar("Item")


def fitting(
    stage: Stage[Any],
    path: str,
    rows: Sequence[Row],
    encode: Callable[[Row], tuple[Item, int]],
    limit: int,
    reserve: int = 0,
) -> tuple[list[tuple[Row, Item]], int]:
    """Rows whose tokens plus `reserve` new ones stay within `limit`, each with what `encode` made of it.

    `encode` returns the item and its tokens. Returns the rows that fit and the number of those that do not.
    Raises UserError for the first row that does not fit when `long_rows` is refuse, or when no row fits.
    """
    kept, dropped = [], 0
    for number, row in enumerate(rows, start=1):
        item, tokens = encode(row)
        if tokens + reserve <= limit:
            kept.append((row, item))
        elif stage.common.long_rows == "drop":
            dropped += 1
        else:
            extra = f" and {reserve} new ones" if reserve else ""
            raise UserError(
                f"{path}, row {number}: {tokens} tokens{extra} are longer than the {limit} that fit; "
                "shorten the row, enlarge the context or the limit, or set long_rows: drop"
            )
    if rows and not kept:
        raise UserError(f"{path}: none of its {len(rows)} rows fits into {limit} tokens; enlarge the context")
    if dropped:
        stage.say(f"{path}: {dropped} of {len(rows)} rows are too long and were dropped")
    return kept, dropped


def prompt_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Row], tuple[list[int], int]]:
    """An `encode` for rows of which only the prompt counts."""

    def encode(row: Row) -> tuple[list[int], int]:
        ids = encode_prompt(tokenizer, row["prompt"])
        return ids, len(ids)

    return encode
