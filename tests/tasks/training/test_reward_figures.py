"""Figures of the reward model on held-out pairs, against values computed by hand."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.evaluation.intervals import clustered_interval
from rlhf_core.reward import Comparison, PairScores, pair_batch
from tasks.page.inputs import interval
from tasks.summary import not_better_than
from tasks.training import reward_figures
from tasks.training.reward_figures import baseline_figures, figures_of, gold_margins

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
    tokenizer: Any = SimpleNamespace(eos_token_id=0)

    def row(prompt: int, chosen: int, rejected: int) -> dict[str, Any]:
        return {
            "prompt": [{"role": "user", "content": str(prompt)}],
            "chosen": str(chosen),
            "rejected": str(rejected),
            "chosen_ids": [chosen],
            "rejected_ids": [rejected],
            "chosen_ended": False,
            "rejected_ended": False,
        }

    rows = [row(10, 3, 1), row(1, 5, 9), row(10, 2, 3), row(7, 1, 2)]
    pairs = [Comparison([10], [[3], [1], [2]], [(0, 1), (2, 0)]), Comparison([1], [[5], [9]], [(0, 1)])]
    batch, chosen, _ = pair_batch(pairs, pad_id=0)
    assert batch.input_ids[chosen, -1].tolist() == [3, 2, 5]
    assert gold_margins(rows, tokenizer, pairs, NumberJudge(), "sampled", 64).tolist() == [20.0, -10.0, -4.0]


class Letters:
    """A tokenizer of tests: each id is a letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(chr(token) for token in ids)


def test_baselines_on_the_same_pairs() -> None:
    """The shorter answer wins in training and held-out pairs, and is the one with the word `a`; the third held-out pair
    has neither. The model of `SCORES` has 2.5 of 4."""
    a, b, c = ord("a"), ord("b"), ord("c")
    training = [Comparison([], [[a], [b, b]], [(0, 1)])] * 3
    heldout = [
        Comparison([], [[a], [b, c]], [(0, 1)]),
        Comparison([], [[a, a], [b], [c]], [(0, 1), (2, 1)]),
        Comparison([], [[a], [b, b]], [(0, 1)]),
    ]
    metrics = baseline_figures(Letters(), training, heldout, SCORES, seed=1)  # type: ignore[arg-type]
    assert metrics["length_accuracy"] == (0 + 1 + 0.5 + 0) / 4
    assert metrics["words_accuracy"] == 1.0, "c has no weight and b a negative one"
    assert metrics["ahead_of_length"] == 0.625 - 0.375
    assert metrics["ahead_of_words"] == -0.375
    assert interval(metrics, "ahead_of_words") == clustered_interval([0, -1, -0.5, 0], [0, 1, 1, 2], 2000, 1)
    assert "reward_rating_pearson" not in metrics
    assert not_better_than(metrics | {"heldout_accuracy_low": 0.6}) == "a bag of words"
    assert not_better_than({"heldout_accuracy_low": 0.5}) == "chance"
    assert not_better_than({"heldout_accuracy_low": 0.6}) is not_better_than({}) is None


def test_correlations_with_ratings() -> None:
    """Four answers: the scores have the order of the ratings, the lengths the opposite one."""
    answers = [[97] * length for length in (4, 3, 2, 1)]
    heldout = [Comparison([], answers, [(3, 0), (2, 1), (3, 2)], ratings=[1.0, 2.0, 3.0, 4.0])]
    scores = PairScores(chosen=torch.tensor([9.0, 2.0, 9.0]), rejected=torch.tensor([0.0, 1.0, 2.0]))
    metrics = baseline_figures(Letters(), heldout, heldout, scores, seed=1)  # type: ignore[arg-type]
    assert metrics["reward_rating_spearman"] == pytest.approx(1.0)
    assert metrics["reward_rating_pearson"] == pytest.approx(np.corrcoef([0, 1, 2, 9], [1, 2, 3, 4])[0, 1])
    assert metrics["length_rating_spearman"] == pytest.approx(-1.0)
    low, high = interval(metrics, "reward_rating_pearson")  # type: ignore[misc]
    assert low <= metrics["reward_rating_pearson"] <= high
