"""A reward model's calibration on pairs, its accuracy by margin, and histograms of its scores. Pure functions of
arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from rlhf_core.evaluation.intervals import clustered_interval

DIGITS = 9
"""Of a margin: 2.4 − 0.8 and 1.6 are the same."""


@dataclass(frozen=True)
class CalibrationBin:
    """Pairs whose confidence (the predicted probability of the preferred response) is in [low, high)."""

    low: float
    high: float
    predicted: float
    observed: float
    pairs: int


def calibration(gaps: Sequence[float], bins: int = 10) -> tuple[list[CalibrationBin], float]:
    """How often the response that the model prefers is the chosen one, by confidence.

    `gaps` are R(chosen) − R(rejected). Confidence is σ(|gap|) in [½, 1); the second value is the expected calibration
    error, the mean |predicted − observed| weighted by pairs (Guo et al. 2017). Empty bins are left out.
    """
    array = np.asarray(gaps, dtype=np.float64)
    confidence = 1.0 / (1.0 + np.exp(-np.abs(array)))
    right = (array > 0) + 0.5 * (array == 0)
    edges = np.linspace(0.5, 1.0, bins + 1)
    place = np.clip(np.digitize(confidence, edges) - 1, 0, bins - 1)
    result = []
    for i in range(bins):
        inside = place == i
        if inside.any():
            predicted, observed = float(confidence[inside].mean()), float(right[inside].mean())
            result.append(CalibrationBin(float(edges[i]), float(edges[i + 1]), predicted, observed, int(inside.sum())))
    error = sum(b.pairs * abs(b.predicted - b.observed) for b in result) / max(1, len(array))
    return result, error


@dataclass(frozen=True)
class MarginBucket:
    """Pairs whose margin is in [low, high], the share of them that is ordered rightly, and its 95% interval."""

    low: float
    high: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    pairs: int


def accuracy_by_margin(
    right: Sequence[float] | Float[ndarray, "pairs"],
    margins: Sequence[float] | Float[ndarray, "pairs"],
    prompts: Sequence[int] | Int[ndarray, "pairs"],
    resamples: int,
    seed: int,
    buckets: int = 5,
) -> list[MarginBucket]:
    """Accuracy in buckets of about equally many pairs, in order of the margin.

    `right` is 1, ½ or 0 a pair, `margins` the distance between its sides (≥ 0), `prompts` the prompt of the pair, which
    intervals resample. Margins equal to nine digits stay in one bucket, so that there may be fewer buckets. `low` and
    `high` are the smallest and the largest margin in it.
    """
    hits, owners = np.asarray(right, dtype=np.float64), np.asarray(prompts)
    sizes = np.round(np.asarray(margins, dtype=np.float64), DIGITS)
    edges = np.unique(np.quantile(sizes, np.linspace(0, 1, buckets + 1)[1:-1], method="higher"))
    place = np.searchsorted(edges, sizes, side="right")
    result = []
    for i in np.unique(place):
        inside = place == i
        low, high = clustered_interval(hits[inside], owners[inside], resamples, seed)
        found = sizes[inside]
        accuracy = float(hits[inside].mean())
        result.append(MarginBucket(float(found.min()), float(found.max()), accuracy, low, high, len(found)))
    return result


@dataclass(frozen=True)
class ScoreBin:
    """Shares of the chosen and of the rejected responses whose score lies in [low, high); the last bin
    holds `high`, too."""

    low: float
    high: float
    chosen: float
    rejected: float


def score_histogram(
    chosen: Sequence[float] | Float[ndarray, "pairs"],
    rejected: Sequence[float] | Float[ndarray, "pairs"],
    bins: int = 20,
) -> list[ScoreBin]:
    """The scores of both sides of all pairs, in bins of equal width from the lowest to the highest score.

    Raises ValueError without pairs.
    """
    if not len(chosen) or not len(rejected):
        raise ValueError("a histogram needs at least one pair")
    edges = np.histogram_bin_edges(np.concatenate([chosen, rejected]).astype(np.float64), bins)
    shares = [np.histogram(side, edges)[0] / len(side) for side in (chosen, rejected)]
    return [
        ScoreBin(float(edges[i]), float(edges[i + 1]), float(shares[0][i]), float(shares[1][i])) for i in range(bins)
    ]
