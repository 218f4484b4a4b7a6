"""Evaluates the reward model on held-out pairs: accuracy, calibration, scores and agreement with the judge."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers, Scorer
from rlhf_core.data.tokenizer import encode_prompt
from rlhf_core.evaluation.calibration import accuracy_by_margin, calibration, score_histogram
from rlhf_core.evaluation.intervals import bounds, clustered_interval
from rlhf_core.reward import Comparison, PairScores
from tasks.datasets.jsonl import Row
from tasks.training.pairs import SIDES, response_tokens

RESAMPLES = 2000
Table = list[dict[str, float]]


def figures_of(
    scores: PairScores, pairs_of_prompts: Sequence[int], gold: Float[ndarray, "pairs"] | None, seed: int
) -> tuple[dict[str, Any], dict[str, Table]]:
    """Metrics of held-out pairs, which are in the order of their prompts, and rows of plots/*.csv by path.

    `pairs_of_prompts` is the number of pairs of each prompt: intervals resample prompts, since pairs of one prompt
    share responses. `gold` is the judge's margin of each pair, chosen minus rejected; None without a judge. A pair on
    which the judge, or the reward model, is undecided is half an agreement.
    """
    gaps, right = (scores.chosen - scores.rejected).double().numpy(), scores.right.double().numpy()
    owners = np.repeat(np.arange(len(pairs_of_prompts)), pairs_of_prompts)
    bins, error = calibration(gaps.tolist())
    margins = accuracy_by_margin(right, np.abs(gaps if gold is None else gold), owners, RESAMPLES, seed)
    metrics: dict[str, Any] = {
        "heldout_accuracy": float(right.mean()),
        **bounds("heldout_accuracy", clustered_interval(right, owners, RESAMPLES, seed)),
        "heldout_loss": scores.loss,
        "heldout_pairs": len(right),
        "heldout_prompts": len(pairs_of_prompts),
        "expected_calibration_error": error,
        "margin_by": "reward" if gold is None else "gold",
        "gold_agreement": None,
        **bounds("gold_agreement", None),
        "gold_label_agreement": None,
    }
    if gold is not None:
        alike = 0.5 * (1 + np.sign(gaps) * np.sign(gold))
        metrics["gold_agreement"] = float(alike.mean())
        metrics |= bounds("gold_agreement", clustered_interval(alike, owners, RESAMPLES, seed))
        metrics["gold_label_agreement"] = float((0.5 * (1 + np.sign(gold))).mean())
    tables: dict[str, Table] = {
        "plots/reward_calibration.csv": [
            {"bin_low": b.low, "bin_high": b.high, "predicted": b.predicted, "observed": b.observed, "pairs": b.pairs}
            for b in bins
        ],
        "plots/reward_margins.csv": [vars(b) for b in margins],
        "plots/reward_scores.csv": [vars(b) for b in score_histogram(scores.chosen.numpy(), scores.rejected.numpy())],
    }
    return metrics, tables


def gold_margins(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Comparison],
    judge: Scorer,
    as_text: bool = False,
) -> Float[ndarray, "pairs"]:
    """The judge's score of the chosen minus that of the rejected response, in the order of `score_pairs`. `rows` are
    the rows of preferences.jsonl that the pairs were made from, with `as_text` as `comparisons` made them."""
    texts: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Conversation, str]] = {}
    for row in rows:
        prompt = tuple(encode_prompt(tokenizer, row["prompt"]))
        for side in SIDES:
            texts[prompt, tuple(response_tokens(tokenizer, row, side, as_text))] = row["prompt"], row[side]
    sides = [
        [texts[tuple(c.prompt), tuple(c.responses[pair[side]])] for c in pairs for pair in c.pairs] for side in (0, 1)
    ]
    chosen, rejected = (judge(Answers([p for p, _ in side], [text for _, text in side])).total for side in sides)
    return np.subtract(chosen, rejected, dtype=np.float64)
