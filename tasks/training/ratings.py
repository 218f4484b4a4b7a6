"""The ratings of data/ingest/ratings.jsonl as comparisons, for the reward model.

A comparison has eight answers to any prompts, each as one sequence with its prompt, and every two with different
ratings are a pair. If an answer is good with the probability σ(R), then of two answers of which one is good it is the
first with the probability σ(R₁ − R₂): with labels 0 and 1, Bradley-Terry on the pairs estimates the R of a logistic
regression, up to a constant, which PPO's normalisation removes. Of scores only the order counts."""

from itertools import combinations
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.tokenizer import encode_response
from rlhf_core.errors import UserError
from rlhf_core.reward import Comparison
from tasks.datasets.jsonl import Row
from tasks.stage.long_rows import fitting, prompts_once
from tasks.stage.stage import Stage

RATINGS = "data/ingest/ratings.jsonl"
GROUP = 8
"""Answers in a comparison."""


def rated_comparisons(
    stage: Stage[Any], tokenizer: PreTrainedTokenizerBase, split: str, limit: int
) -> tuple[list[Comparison], int]:
    """The comparisons of a split, of consecutive rows, which are in random order; and how many rows did not fit.
    Raises UserError where no two ratings differ."""
    prompt_ids = prompts_once(tokenizer)

    def encode(row: Row) -> tuple[list[int], int]:
        ids = prompt_ids(row) + encode_response(tokenizer, row["response"])
        return ids, len(ids)

    rows = [row for row in stage.read(RATINGS) if row["split"] == split]
    kept, too_long = fitting(stage, f"{RATINGS}, split {split}", rows, encode, limit, key=f"{stage.name}.max_tokens")
    groups = (kept[start : start + GROUP] for start in range(0, len(kept), GROUP))
    found = [
        Comparison([], [ids for _, ids in group], pairs, ratings=[float(row["rating"]) for row, _ in group])
        for group in groups
        if (pairs := _ordered(group))
    ]
    if not found:
        raise UserError(f"{RATINGS}: no two neighbouring {split} ratings differ; add rows with other ratings")
    return found, too_long


def _ordered(group: list[tuple[Row, list[int]]]) -> list[tuple[int, int]]:
    """The places (better, worse) of every two answers with different ratings."""
    ratings = [row["rating"] for row, _ in group]
    both = [(i, j) if ratings[i] > ratings[j] else (j, i) for i, j in combinations(range(len(group)), 2)]
    return [(better, worse) for better, worse in both if ratings[better] != ratings[worse]]
