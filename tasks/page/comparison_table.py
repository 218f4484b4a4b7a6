"""The columns of the table of models, with units, digits and direction, for the report page and `leash compare`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from tasks.page.inputs import finite, interval
from tasks.page.wording import MISSING, number, percent
from tasks.params.methods import BY_NAME

Figures = Mapping[str, Any]
"""An entry of `models` in metrics/evaluate.json."""

COST = ("response_tokens", "distinct_2", "alignment_tax", "samples_generated", "samples_per_answer", "tokens_trained")
"""The columns of the page's second table."""
MOST_SHARE = 2.0
"""Of the optimum. A share beyond it comes from two gains near zero."""
JUDGING = "win_rate_by_judging_model"
TERM = "reward/"
"""Beginning of the name of a figure of one term of the score."""
DISAGREEMENT = "reward/std"
"""The figure of several reward models that is no term."""
LABELS = {"sft": "SFT", "policy": "PPO policy"}
BEST_OF = re.compile(r"best_of_(\d+)")
ROUND = re.compile(r"round_(\d+)")


@dataclass(frozen=True)
class Column:
    """A column: one figure of every model."""

    key: str
    name: str
    unit: str
    kind: Literal["number", "share", "count"] = "number"
    digits: int = 2
    better: Literal["higher", "lower"] | None = None
    """None for figures that no model is ranked by: proxy score, KL, length, cost."""
    meaning: str = ""
    """For the glossary of the page."""

    def text(self, value: Any) -> str:
        """`value` as text; an en dash if unknown, or if it is a share of the optimum that is only noise."""
        known = finite(value)
        if self.key == "optimum_share" and known is not None and abs(known) > MOST_SHARE:
            return MISSING
        if self.kind == "share":
            return percent(value, self.digits)
        return number(value, 0 if self.kind == "count" else self.digits)


COLUMNS = (
    Column("gold", "Gold score", "mean", better="higher",
           meaning="The mean score of the judge, which is not used in training."),
    Column("reward", "Proxy score", "reward model, raw",
           meaning="The score that the models were trained or picked by. "
                   "Where it rises and the answers get no better, it is exploited."),
    Column("win_rate", "Win rate against SFT", "a tie is half", "share", 1, "higher",
           "The share of prompts on which the model’s answer is better than SFT’s."),
    Column("win_rate_controlled", "At equal length", "the same, controlled", "share", 1, "higher",
           "The win rate for answers of equal length, by a logistic regression of the wins on the "
           "difference in length."),
    Column("win_rate_by_reward_model", "By PPO’s own score", "the same win rate", "share", 1,
           meaning="The win rate by the score that PPO maximised. It is too high where PPO exploits that score."),
    Column(JUDGING, "By the judging reward model", "the same win rate", "share", 1,
           meaning="The win rate by a reward model that was trained on the pairs of other prompts, with another seed."),
    Column("win_rate_vs_policy", "Win rate against PPO", "a tie is half", "share", 1, "higher",
           "The share of prompts on which the model’s answer is better than that of the PPO policy."),
    Column("kl", "KL to SFT", "nats per answer",
           meaning="How far the model is from SFT: the KL divergence of its next-token distributions, summed over its "
                   "own answers. For best-of-n it is the bound log n − (n−1)/n."),
    Column("optimum_share", "Share of the optimum", "its proxy gain at this KL", "share", 0,
           meaning="The model’s proxy gain over SFT, divided by the gain of the optimum π_SFT·exp(R/β)/Z at the same "
                   "KL. None can have more than 100%, up to the error of both. Beyond ±200% it is noise, not shown."),
    Column("response_tokens", "Length", "tokens", digits=1, meaning="The mean number of tokens in an answer."),
    Column("distinct_2", "Distinct-2", "share of word pairs", digits=3, better="higher",
           meaning="Different word pairs, divided by all word pairs, in one set of answers. Low: the answers "
                   "repeat themselves."),
    Column("alignment_tax", "Alignment tax", "nats per token", digits=3,
           meaning="The loss on held-out demonstrations less SFT’s: what the training lost of SFT."),
    Column("samples_generated", "Samples to train it", "generated", "count",
           meaning="Answers that were sampled to train the model."),
    Column("samples_per_answer", "Samples an answer", "at inference", "count",
           meaning="Answers that are sampled, of which one is given."),
    Column("tokens_trained", "Tokens trained", "of responses", "count",
           meaning="Response tokens that its backward passes read."),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One figure as it is printed."""

    text: str
    low: str = ""
    high: str = ""
    """The ends of its 95% interval; empty where there is none."""
    best: bool = False


RECIPES = {"ppo_style": "{} (PPO style)", "dr_grpo": "Dr. {}", "gdpo": "GDPO", "base": "{} (the base model)"}
"""Display names of methods that are not the published ones, and of SFT where it is switched off."""


def label(model: str, models: Mapping[str, Figures] = MappingProxyType({})) -> str:
    """The display name of a model; `models` are the figures of all, which say by which recipe a method was trained."""
    recipe = models.get(model, {}).get("recipe")
    if recipe in RECIPES:
        return RECIPES[recipe].format(label(model))
    if match := BEST_OF.fullmatch(model):
        return f"Best of {match.group(1)}"
    if match := ROUND.fullmatch(model):
        return f"Round {match.group(1)}'s policy"
    return BY_NAME[model].label if model in BY_NAME else LABELS.get(model, model)


def columns_of(models: Mapping[str, Figures]) -> list[Column]:
    """The columns that at least one model has a figure for; a win rate that is the main one is not shown twice. Behind
    the proxy score are those of its terms, where it has several."""
    known = [column for column in COLUMNS if any(finite(one.get(column.key)) is not None for one in models.values())]
    twice = all(one.get(JUDGING) == one.get("win_rate") for one in models.values())
    known = [column for column in known if not (twice and column.key == JUDGING)]
    figures = dict.fromkeys(name for one in models.values() for name in one if name.startswith(TERM))
    ends = {f"{name}{end}" for name in figures for end in ("_low", "_high")}
    terms = [name for name in figures if name not in ends and name != DISAGREEMENT]
    if not terms:
        return known
    shown = [Column(name, name.removeprefix(TERM), "mean") for name in terms]
    found = []
    for column in known:
        proxy = column.key == "reward"
        found += [replace(column, unit="scorer, raw")] if proxy else [column]
        found += shown if proxy and len(shown) > 1 else []
    return found


def cells(models: Mapping[str, Figures], column: Column) -> dict[str, Cell]:
    """One cell for each model. In a column with a direction, all cells with the best printed value are marked as best,
    unless all are equal."""
    known = {name: value for name, one in models.items() if (value := finite(one.get(column.key))) is not None}
    best = ""
    if column.better and len({column.text(value) for value in known.values()}) > 1:
        best = column.text(max(known.values()) if column.better == "higher" else min(known.values()))
    return {name: _cell(one, column, best) for name, one in models.items()}


def _cell(figures: Figures, column: Column, best: str) -> Cell:
    text = column.text(figures.get(column.key))
    ends = interval(figures, column.key) if text != MISSING else None
    low, high = ("", "") if ends is None else map(column.text, ends)
    return Cell(text, low, high, bool(best) and text == best)
