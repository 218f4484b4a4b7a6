"""Rows of a dataset as token ids. Rows that do not fit are refused, all of them at once, or dropped and counted."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.tokenizer import continues_text, encode_prompt, encode_response
from rlhf_core.errors import UserError
from rlhf_core.progress import report
from tasks.datasets.jsonl import Row
from tasks.datasets.problems import print_problems
from tasks.stage.stage import Stage

Item = TypeVar("Item")

MANY = 0.2
"""The share of rows that do not fit, or of answers that do not end, above which a stage warns."""
ANSWERS = {
    "data/ingest/demonstrations.jsonl": ("response",),
    "data/ingest/pairs.jsonl": ("chosen", "rejected"),
    "data/ingest/ratings.jsonl": ("response",),
    "data/ingest/preference_prompts.jsonl": (),
    "data/ingest/ppo_prompts.jsonl": (),
    "data/ingest/heldout.jsonl": (),
}
"""The datasets of a run, with the columns of the answers that the models read."""


def fitting(
    stage: Stage[Any],
    path: str,
    rows: Sequence[Row],
    encode: Callable[[Row], tuple[Item, int]],
    limit: int,
    reserve: int = 0,
    key: str = "",
) -> tuple[list[tuple[Row, Item]], int]:
    """Rows whose tokens plus `reserve` new ones stay within `limit`, each with what `encode` made of it. `key`: the
    parameter of the limit, for messages; empty: the context is the limit.

    `encode` returns the item and its tokens. Returns the rows that fit and the number of those that do not.
    Raises UserError when `long_rows` is refuse and rows do not fit (several are listed before), or when no row fits;
    an error of `encode` gets the row's place.
    """
    enlarged = key or "the context or the limit"
    kept, long, lengths = [], list[tuple[int, int]](), []
    for number, row in enumerate(rows, start=1):
        item, tokens = _encoded(encode, path, number, row)
        report("encoding", number, len(rows))
        lengths.append(tokens + reserve)
        if tokens + reserve <= limit:
            kept.append((row, item))
        else:
            long.append((number, tokens))
    if long and stage.common.long_rows == "refuse":
        number, tokens = long[0]
        extra = f" and {reserve} new ones" if reserve else ""
        more = f" (first of {len(long)} such rows of {len(rows)})" if len(long) > 1 else ""
        print_problems((f"{path}, row {n}: {t} tokens{extra}" for n, t in long), len(long), stage.log)
        raise UserError(
            f"{path}, row {number}: {tokens} tokens{extra} are longer than the {limit} that fit{more}; "
            f"shorten the row, enlarge {enlarged}, or set long_rows: drop"
        )
    if rows and not kept:
        raise UserError(f"{path}: none of its {len(rows)} rows fits into {limit} tokens; enlarge {enlarged}")
    if len(long) > MANY * len(rows):
        enough = sorted(lengths)[math.ceil(0.95 * len(lengths)) - 1]
        remedy = f"raise {key}" if key else "choose a model with a longer context, or lower max_new_tokens"
        stage.warn(
            f"{path}: {len(long)} of {len(rows)} rows ({len(long) / len(rows):.0%}) have more than {limit} tokens and "
            f"were dropped; 95% of the rows need {enough} tokens or less: {remedy}"
        )
    elif long:
        stage.log(f"{path}: {len(long)} of {len(rows)} rows are too long and were dropped")
    return kept, len(long)


def fitting_prompts(
    stage: Stage[Any],
    path: str,
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    max_new_tokens: int,
    max_prompt_tokens: int | None = None,
) -> tuple[list[tuple[Row, list[int]]], int]:
    """Rows whose prompt is at most `max_prompt_tokens` long and leaves `max_new_tokens` of the context for an answer,
    each with the ids of its prompt, and the number of the others. Raises as `fitting`."""
    encode = prompt_encoder(tokenizer)
    if max_prompt_tokens is not None and max_prompt_tokens + max_new_tokens < context:
        return fitting(stage, path, rows, encode, max_prompt_tokens, key="max_prompt_tokens")
    return fitting(stage, path, rows, encode, context, reserve=max_new_tokens)


def warn_of_cut_answers(
    stage: Stage[Any], tokenizer: PreTrainedTokenizerBase, whose: str, cut: Sequence[bool], limit: int, key: str
) -> None:
    """Warn where many answers did not end within `limit` tokens, the parameter `key`. Not for a model that continues
    texts (`base.format: text`), whose answers need no end."""
    if not continues_text(tokenizer) and sum(cut) > MANY * len(cut):
        stage.warn(
            f"{sum(cut)} of {len(cut)} answers of {whose} ({sum(cut) / len(cut):.0%}) are cut off at {limit} tokens; "
            f"raise {key}, or ask for shorter answers: without its end an answer is judged as if it had one"
        )


def _encoded(encode: Callable[[Row], tuple[Item, int]], path: str, number: int, row: Row) -> tuple[Item, int]:
    try:
        return encode(row)
    except UserError as error:
        raise UserError(f"{path}, row {number}: {error}") from None


def require_context(stage: Stage[Any], tokenizer: PreTrainedTokenizerBase, context: int) -> None:
    """Raise UserError when `long_rows` is refuse and rows of the run's datasets do not fit into the model's context: a
    prompt with its longest answer, a bare prompt with the first token of one."""
    prompt_ids = prompts_once(tokenizer)
    for path, columns in ANSWERS.items() if stage.common.long_rows == "refuse" else ():

        def encode(row: Row, columns: Sequence[str] = columns) -> tuple[None, int]:
            answers = [len(encode_response(tokenizer, row[name])) for name in columns]
            return None, len(prompt_ids(row)) + max(answers, default=1)

        fitting(stage, path, stage.read(path), encode, context)


def prompts_once(tokenizer: PreTrainedTokenizerBase) -> Callable[[Row], list[int]]:
    """The token ids of a row's prompt. A prompt (`prompt_id`) that many rows share is encoded once: chat templates are
    slow."""
    known: dict[str, list[int]] = {}

    def ids(row: Row) -> list[int]:
        name: str = row["prompt_id"]
        if name not in known:
            known[name] = encode_prompt(tokenizer, row["prompt"])
        return known[name]

    return ids


def prompt_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Row], tuple[list[int], int]]:
    """An `encode` for rows of which only the prompt counts."""
    prompt_ids = prompts_once(tokenizer)

    def encode(row: Row) -> tuple[list[int], int]:
        ids = prompt_ids(row)
        return ids, len(ids)

    return encode
