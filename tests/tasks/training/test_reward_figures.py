"""Figures of the reward model on held-out pairs, against values computed by hand."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.evaluation.intervals import clustered_interval
from rlhf_core.reward import Comparison, PairScores, pair_batch
from tasks.page.inputs import interval
from tasks.training import reward_figures
from tasks.training.reward_figures import figures_of, gold_margins

SCORES = PairScores(chosen=torch.tensor([2.0, 1.0, 0.0, 3.0]), rejected=torch.tensor([1.0, 3.0, 0.0, 0.0]))
"""Pairs of three prompts (1, 2 and 1): right, wrong, undecided, right."""
PAIRS = [1, 2, 1]


def test_figures_without_a_judge_go_by_the_models_own_gap() -> None:
    metrics, tables = figures_of(SCORES, PAIRS, None, seed=1)
    assert metrics["heldout_accuracy"] == 0.625
    assert interval(metrics, "heldout_accuracy") == clustered_interval([1, 0, 0.5, 1], [0, 1, 1, 2], 2000, 1)
    assert (metrics["heldout_pairs"], metrics["heldout_prompts"]) == (4, 3)
    assert metrics["margin_by"] == "reward"
    assert [(b["low"], b["high"], b["accuracy"], b["pairs"]) for b in tables["plots/reward_margins.csv"]] == [
        (0.0, 0.0, 0.5, 1),
        (1.0, 1.0, 1.0, 1),
        (2.0, 2.0, 0.0, 1),
        (3.0, 3.0, 1.0, 1),
    ]
    assert metrics["gold_agreement"] is interval(metrics, "gold_agreement") is metrics["gold_label_agreement"] is None


def test_figures_with_a_judge_go_by_its_margin() -> None:
    """The second label is a mistake that the model does not make; the third pair the model leaves undecided."""
    metrics, tables = figures_of(SCORES, PAIRS, np.array([1.5, -1.5, 0.5, 0.5]), seed=1)
    assert metrics["margin_by"] == "gold"
    assert [(b["low"], b["high"], b["accuracy"], b["pairs"]) for b in tables["plots/reward_margins.csv"]] == [
        (0.5, 0.5, 0.75, 2),
        (1.5, 1.5, 0.5, 2),
    ]
    assert metrics["gold_agreement"] == (1 + 1 + 0.5 + 1) / 4
    assert interval(metrics, "gold_agreement") == (0.75, 1.0)
    assert metrics["gold_label_agreement"] == 0.75


def test_the_tables_agree_with_the_metrics() -> None:
    _, tables = figures_of(SCORES, PAIRS, None, seed=1)
    assert {out: list(rows[0]) for out, rows in tables.items()} == {
        "plots/reward_calibration.csv": ["bin_low", "bin_high", "predicted", "observed", "pairs"],
        "plots/reward_margins.csv": ["low", "high", "accuracy", "accuracy_low", "accuracy_high", "pairs"],
        "plots/reward_scores.csv": ["low", "high", "chosen", "rejected"],
    }
    scores = tables["plots/reward_scores.csv"]
    assert sum(row["chosen"] for row in scores) == pytest.approx(1.0)
    assert sum(row["rejected"] for row in scores) == pytest.approx(1.0)
    assert (scores[0]["low"], scores[-1]["high"]) == (0.0, 3.0)


@dataclass(frozen=True)
class NumberJudge:
    """A judge for which a response is its score, and a prompt its factor."""

    name: str = "numbers"

    def __call__(self, answers: Answers) -> Scored:
        return Scored([float(p[0]["content"]) * float(r) for p, r in zip(answers.prompts, answers.texts, strict=True)])


def test_gold_margins_are_in_the_order_of_score_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two prompts are mixed; pairs are grouped by prompt, and one pair was left out."""
    monkeypatch.setattr(reward_figures, "encode_prompt", lambda tokenizer, prompt: [int(prompt[0]["content"])])
    tokenizer: Any = None

    def row(prompt: int, chosen: int, rejected: int) -> dict[str, Any]:
        return {
            "prompt": [{"role": "user", "content": str(prompt)}],
            "chosen": str(chosen),
            "rejected": str(rejected),
            "chosen_ids": [chosen],
            "rejected_ids": [rejected],
        }

    rows = [row(10, 3, 1), row(1, 5, 9), row(10, 2, 3), row(7, 1, 2)]
    pairs = [Comparison([10], [[3], [1], [2]], [(0, 1), (2, 0)]), Comparison([1], [[5], [9]], [(0, 1)])]
    batch, chosen, _ = pair_batch(pairs, pad_id=0)
    assert batch.input_ids[chosen, -1].tolist() == [3, 2, 5]
    assert gold_margins(rows, tokenizer, pairs, NumberJudge()).tolist() == [20.0, -10.0, -4.0]
