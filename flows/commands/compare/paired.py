"""Differences between two runs' answers to the same prompts, paired by prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from flows.commands.compare.sources import Compared
from rlhf_core.evaluation.intervals import Estimate, estimate_difference
from tasks.datasets.jsonl import Row
from tasks.page.comparison_table import COLUMNS, Column

FIGURES = ("gold", "reward", "kl", "tokens")
"""Columns of answers.jsonl."""
RESAMPLES, SEED = 2000, 1

Difference = Mapping[str, Estimate]


@dataclass(frozen=True)
class Paired:
    """A run minus the first run."""

    prompts: int
    """Number of prompts with answers in both runs."""
    models: Mapping[str, Difference]
    """By model and column of answers.jsonl."""


def column_of(figure: str) -> Column:
    """The column that says how a difference of this figure is printed."""
    key = {"tokens": "response_tokens", "kl": "kl_exact"}.get(figure, figure)
    return next(column for column in COLUMNS if column.key == key)


def paired(first: Compared, other: Compared, models: Sequence[str]) -> Paired | str:
    """The differences of the models that both runs have, or why there are none, in one line.

    Best-of-n is left out: answers.jsonl has one pick of it, its figures use all samples. Scores of two reward models
    are not compared: they have different zeros.
    """
    for run in (first, other):
        if isinstance(run.answers, str):
            return f"{run.name}: no paired difference, {run.answers}"
    ours, theirs = _by_model(first.answers), _by_model(other.answers)
    shared = [name for name in models if name in ours and name in theirs]
    prompts = set.intersection(*(set(of[name]) for of in (ours, theirs) for name in shared)) if shared else set()
    if len(prompts) < 2:
        return f"{other.name}: no paired difference, it has no model and prompts in common with {first.name}"
    figures = [figure for figure in FIGURES if figure != "reward" or _same_reward_model(first, other)]
    found = {name: _differences(ours[name], theirs[name], sorted(prompts), figures) for name in shared}
    return Paired(len(prompts), found)


def _by_model(answers: Any) -> dict[str, dict[str, list[Row]]]:
    """Rows by model and prompt."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in answers:
        if row["seed"] is not None:
            found.setdefault(row["model"], {}).setdefault(row["prompt_id"], []).append(row)
    return found


def _differences(
    ours: Mapping[str, list[Row]], theirs: Mapping[str, list[Row]], prompts: Sequence[str], figures: Sequence[str]
) -> dict[str, Estimate]:
    found = {}
    for figure in figures:
        if all(row.get(figure) is not None for run in (ours, theirs) for prompt in prompts for row in run[prompt]):
            before, after = ([_mean(run[prompt], figure) for prompt in prompts] for run in (ours, theirs))
            found[figure] = estimate_difference(before, after, RESAMPLES, SEED)
    return found


def _mean(rows: Sequence[Row], figure: str) -> float:
    return fmean(float(row[figure]) for row in rows)


def _same_reward_model(first: Compared, other: Compared) -> bool:
    """Whether both give the SFT model's answers the same mean."""
    means = [run.evaluation["models"].get("sft", {}).get("reward") for run in (first, other)]
    return means[0] is not None and means[0] == means[1]
