"""Evaluates the reward model on held-out pairs: accuracy, calibration, scores, agreement with the judge, and two
baselines that cost nothing."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers, Scorer, correlation
from rlhf_core.data.tokenizer import encode_prompt
from rlhf_core.evaluation.baselines import BagOfWords, ranks
from rlhf_core.evaluation.calibration import accuracy_by_margin, calibration, score_histogram
from rlhf_core.evaluation.intervals import bounds, clustered_interval, percentile_interval, resampled
from rlhf_core.reward import Comparison, PairScores
from tasks.datasets.jsonl import Row
from tasks.training.pairs import SIDES, Reading, response_tokens

RESAMPLES = 2000
Table = list[dict[str, float]]
Floats = Float[ndarray, "values"]


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


def baseline_figures(
    tokenizer: PreTrainedTokenizerBase,
    training: Sequence[Comparison],
    heldout: Sequence[Comparison],
    scores: PairScores,
    seed: int,
) -> dict[str, Any]:
    """How the reward model's held-out `scores` compare with two baselines on the same pairs: the longer answer (in
    tokens), and a bag of words that is fitted to the same training pairs. Accuracy of each, and the model's accuracy
    minus it, with intervals over prompts. Of rated answers also the correlation of ratings with the model's scores, the
    length and the bag of words."""

    def texts(comparisons: Sequence[Comparison]) -> list[str]:
        return [tokenizer.decode(ids, skip_special_tokens=True) for c in comparisons for ids in c.responses]

    def places(comparisons: Sequence[Comparison]) -> list[tuple[int, int]]:
        starts = np.cumsum([0, *(len(c.responses) for c in comparisons)]).tolist()
        return [(s + a, s + b) for s, c in zip(starts, comparisons, strict=False) for a, b in c.pairs]

    owners = np.repeat(np.arange(len(heldout)), [len(c.pairs) for c in heldout])
    better, worse = np.array(places(heldout)).T
    found = {
        "length": np.array([float(len(ids)) for c in heldout for ids in c.responses]),
        "words": BagOfWords.fitted(texts(training), places(training))(texts(heldout)),
    }
    own, metrics = scores.right.double().numpy(), dict[str, Any]()
    for name, of_answers in found.items():
        right = 0.5 * (1 + np.sign(of_answers[better] - of_answers[worse]))
        for key, values in ((f"{name}_accuracy", right), (f"ahead_of_{name}", own - right)):
            metrics |= {key: float(values.mean()), **bounds(key, clustered_interval(values, owners, RESAMPLES, seed))}
    if all(c.ratings is not None for c in heldout):
        ratings = np.array([rating for c in heldout for rating in c.ratings or ()])
        of_model = np.zeros(len(ratings))  # every answer is in a pair
        of_model[better], of_model[worse] = scores.chosen.double().numpy(), scores.rejected.double().numpy()
        for name, of_answers in {"reward": of_model, **found}.items():
            metrics |= rating_figures(f"{name}_rating", of_answers, ratings, seed)
    return metrics


def rating_figures(name: str, scores: Floats, ratings: Floats, seed: int) -> dict[str, Any]:
    """`NAME_pearson` and `NAME_spearman`: the correlation of answers' scores with their ratings, with intervals over
    answers. None where one side does not vary."""
    metrics: dict[str, Any] = {}
    for kind, pair in (("pearson", (scores, ratings)), ("spearman", (ranks(scores), ranks(ratings)))):
        ends = None
        if (value := correlation(*(each.tolist() for each in pair))) is not None:
            drawn = [of_resamples(*pair, rows) for rows in resampled(len(ratings), RESAMPLES, seed)]
            ends = percentile_interval(np.nan_to_num(np.concatenate(drawn)))
        metrics |= {f"{name}_{kind}": value, **bounds(f"{name}_{kind}", ends)}
    return metrics


def of_resamples(first: Floats, second: Floats, rows: Int[ndarray, "resamples answers"]) -> Floats:
    """Pearson's correlation in each resample of the answers; NaN where one side does not vary."""
    a, b = (values[rows] - values[rows].mean(axis=1, keepdims=True) for values in (first, second))
    with np.errstate(invalid="ignore"):
        found: Floats = (a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    return found


def gold_margins(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Comparison],
    judge: Scorer,
    reading: Reading,
    limit: int,
) -> Float[ndarray, "pairs"]:
    """The judge's score of the chosen minus that of the rejected response, in the order of `score_pairs`. `rows` are
    the rows of preferences.jsonl that the pairs were made from, with `reading` and `limit` as `comparisons` made
    them."""
    texts: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Conversation, str]] = {}
    for row in rows:
        prompt = tuple(encode_prompt(tokenizer, row["prompt"]))
        for side in SIDES:
            tokens = response_tokens(tokenizer, row, side, reading, limit - len(prompt))
            texts[prompt, tuple(tokens)] = row["prompt"], row[side]
    sides = [
        [texts[tuple(c.prompt), tuple(c.responses[pair[side]])] for c in pairs for pair in c.pairs] for side in (0, 1)
    ]
    chosen, rejected = (judge(Answers([p for p, _ in side], [text for _, text in side])).total for side in sides)
    return np.subtract(chosen, rejected, dtype=np.float64)
