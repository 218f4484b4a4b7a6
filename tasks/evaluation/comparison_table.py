"""The comparison table: which figures of a model stand in it, in which order, with which unit, digits and direction,
and how a model is called. The report page and `leash compare` print it; neither knows a column of its own."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tasks.page.inputs import finite, interval
from tasks.page.wording import MISSING, number, percent
from tasks.params.methods import BY_NAME

Figures = Mapping[str, Any]
"""What is known of one model: an entry of `models` in metrics/evaluate.json."""

LABELS = {"sft": "SFT", "policy": "PPO policy"}
BEST_OF = re.compile(r"best_of_(\d+)")


@dataclass(frozen=True)
class Column:
    """A figure that all models have, or could have."""

    key: str
    name: str
    unit: str
    kind: Literal["number", "share", "count"] = "number"
    digits: int = 2
    better: Literal["higher", "lower"] | None = None
    """None where more is neither better nor worse: the proxy is what is climbed, and length or KL is a price."""
    interval: str = ""
    """Key of its 95% interval."""

    def text(self, value: Any) -> str:
        """`value` as it is printed everywhere; an en dash where it is not known."""
        if self.kind == "share":
            return percent(value, self.digits)
        return number(value, 0 if self.kind == "count" else self.digits)


COLUMNS = (
    Column("gold", "Gold score", "mean", better="higher", interval="gold_ci95"),
    Column("reward", "Proxy score", "reward model, raw", interval="reward_ci95"),
    Column("win_rate", "Win rate against SFT", "a tie is half", "share", 1, "higher", "win_rate_ci95"),
    Column(
        "win_rate_controlled", "At equal length", "the same, controlled", "share", 1, "higher",
        "win_rate_controlled_ci95",
    ),
    Column(
        "win_rate_vs_policy", "Win rate against PPO", "a tie is half", "share", 1, "higher", "win_rate_vs_policy_ci95"
    ),
    Column("kl", "KL to SFT", "nats per answer", interval="kl_ci95"),
    Column("response_tokens", "Length", "tokens", digits=1, interval="response_tokens_ci95"),
    Column("distinct_2", "Distinct-2", "share of word pairs", digits=3, better="higher"),
    Column("overlap", "Overlap", "of a prompt’s answers", digits=3, better="lower"),
    Column("samples_generated", "Samples generated", "to train it", "count"),
    Column("samples_per_answer", "Samples per answer", "when it is asked", "count"),
    Column("tokens_trained", "Tokens trained", "of responses", "count"),
    Column("alignment_tax", "Alignment tax", "nats per token", digits=3, interval="alignment_tax_ci95"),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One figure as it is printed."""

    text: str
    low: str = ""
    high: str = ""
    """The ends of its 95% interval; empty where there is none."""
    best: bool = False


def label(model: str) -> str:
    """What a model is called in front of people."""
    if match := BEST_OF.fullmatch(model):
        return f"Best of {match.group(1)}"
    return BY_NAME[model].label if model in BY_NAME else LABELS.get(model, model)


def models_of(evaluation: Figures) -> dict[str, Figures]:
    """The models of metrics/evaluate.json, in its order; SFT and policy alone, from its flat keys, where it is older
    than the comparison."""
    models = evaluation.get("models")
    if isinstance(models, Mapping):
        return {str(name): figures for name, figures in models.items() if isinstance(figures, Mapping)}
    both = {name: _flat(evaluation, name) for name in ("sft", "policy")}
    both["policy"] |= {key: evaluation.get(key) for key in ("win_rate", "win_rate_ci95", "alignment_tax")}
    both["policy"] |= {"kl": evaluation.get("kl_per_sequence"), "kl_k3": evaluation.get("kl_k3_per_sequence")}
    return dict(both)


def columns_of(models: Mapping[str, Figures]) -> list[Column]:
    """The columns that at least one model has a figure for."""
    return [column for column in COLUMNS if any(finite(one.get(column.key)) is not None for one in models.values())]


def cells(models: Mapping[str, Figures], column: Column) -> dict[str, Cell]:
    """A cell a model. The best of a column is marked where it has a direction and figures that differ; what is printed
    alike is equally good."""
    known = {name: value for name, one in models.items() if (value := finite(one.get(column.key))) is not None}
    best = ""
    if column.better and len({column.text(value) for value in known.values()}) > 1:
        best = column.text(max(known.values()) if column.better == "higher" else min(known.values()))
    return {name: _cell(one, column, best) for name, one in models.items()}


def _cell(figures: Figures, column: Column, best: str) -> Cell:
    text = column.text(figures.get(column.key))
    ends = interval(figures.get(column.interval)) if text != MISSING else None
    low, high = ("", "") if ends is None else map(column.text, ends)
    return Cell(text, low, high, bool(best) and text == best)


def _flat(evaluation: Figures, name: str) -> dict[str, Any]:
    keys = ("gold", "reward", "response_tokens", "distinct_1", "distinct_2", "heldout_loss")
    return {key: evaluation.get(f"{key}_{name}") for key in keys}
