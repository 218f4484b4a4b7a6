"""Numbers about answers: intervals, win rates, diversity, calibration. Pure functions of lists and tensors; no
models."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_core.determinism import stream

TIE = 1e-9


def bootstrap_interval(values: Sequence[float], resamples: int, seed: int, level: float = 0.95) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean of `values`, one value a prompt.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    data = np.asarray(values, dtype=np.float64)
    generator = stream(seed)
    means = np.array([data[generator.integers(0, len(data), len(data))].mean() for _ in range(resamples)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def wins(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """1 where `second` scores higher than `first`, ½ for a tie, else 0; prompt by prompt."""
    return [0.5 if abs(b - a) <= TIE else float(b > a) for a, b in zip(first, second, strict=True)]


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct n-grams of words over all n-grams of words of all texts (Li et al. 2016); 0 without any."""
    ngrams = [
        tuple(words[i : i + n])
        for words in (text.casefold().split() for text in texts)
        for i in range(len(words) - n + 1)
    ]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's correlation; None where one side does not vary or there are fewer than two values."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(a) < 2 or np.ptp(a) == 0.0 or np.ptp(b) == 0.0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


@dataclass(frozen=True)
class CalibrationBin:
    """Pairs whose predicted probability of the model's own favourite lies in [low, high)."""

    low: float
    high: float
    predicted: float
    observed: float
    pairs: int


def calibration(gaps: Sequence[float], bins: int = 10) -> tuple[list[CalibrationBin], float]:
    """How often the model's favourite of a pair is the chosen one, by how sure the model is.

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
