"""Win rates: wins and ties between scores, and the length-controlled win rate. Pure functions of arrays."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from numpy.typing import ArrayLike

from rlhf_core.evaluation.intervals import Estimate, percentile_interval, resample_counts, resampled
from rlhf_core.evaluation.judges import TIE

RIDGE = 0.01
"""Penalty ½·RIDGE·(a² + b²) on the regression, in nats: what 1/25 of a tied answer adds to the curvature. It keeps the
coefficients finite where all answers win; 300 wins of 300 are read as 0.9997."""
LARGEST_STEP = 1e-9
ITERATIONS = 100
CHUNK = 2**17
"""Probabilities worked on at a time (1 MB each array)."""


def wins(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """1 where `second` scores higher than `first`, ½ for a tie, else 0; prompt by prompt."""
    return [0.5 if abs(b - a) <= TIE else float(b > a) for a, b in zip(first, second, strict=True)]


def length_controlled_win_rate(
    won: ArrayLike,
    extra_tokens: ArrayLike,
    resamples: int,
    seed: int,
    weights: ArrayLike | None = None,
) -> Estimate:
    """The win rate at equal length, with the interval over prompts (spread: None).

    After AlpacaEval 2.0 (Dubois et al. 2024), without its term for a prompt's difficulty: the logistic regression
    P(win) = σ(a + b·tanh(Δ / sd)), where Δ is how many tokens longer the model's answer is and sd the standard
    deviation of Δ over all answers, is fitted by maximum likelihood with a small ridge (`RIDGE`); the result is σ(a). A
    tie is a win of ½. For the interval, prompts are resampled with all their answers and the regression is fitted
    again; sd stays that of the data.

    Args:
        won: wins in [0, 1], [prompts] or [prompts, seeds].
        extra_tokens: Δ, the model's tokens minus the opponent's, of the same shape.
        resamples: how many times prompts are resampled.
        seed: decides the resamples, the same as in `bootstrap_interval`.
        weights: of the answers, of the same shape, such as best-of-n's; None: all weigh the same.

    Raises:
        ValueError: no answers, or different shapes.
    """
    hits, delta = (np.atleast_2d(np.asarray(v, dtype=np.float64).T).T for v in (won, extra_tokens))
    if hits.shape != delta.shape or hits.size == 0:
        raise ValueError(f"wins and lengths must be of one shape and not empty, not {hits.shape} and {delta.shape}")
    share = np.ones_like(hits) if weights is None else np.asarray(weights, dtype=np.float64)
    if share.shape != hits.shape:
        raise ValueError(f"weights must have the shape of the wins, {hits.shape}, not {share.shape}")
    counted = (share * (share.size / share.sum())).reshape(1, -1)
    x, y = _standardised(delta.reshape(-1), counted[0]), hits.reshape(-1)
    answers = hits.shape[1]
    used = counted[0] > 0  # most answers of best-of-n weigh nothing
    owners, counted, x, y = np.repeat(np.arange(len(hits)), answers)[used], counted[:, used], x[used], y[used]
    start = fit_logistic(counted, x, y, np.zeros((1, 2)))
    found = []
    for places in resampled(len(hits), resamples, seed):
        counts = resample_counts(places)
        rows = max(1, CHUNK // len(y))
        for first in range(0, len(counts), rows):
            resample = counts[first : first + rows, owners] * counted
            found.append(fit_logistic(resample, x, y, start)[:, 0])
    return Estimate(float(_sigmoid(start[0, 0])), *percentile_interval(_sigmoid(np.concatenate(found))), None)


def fit_logistic(
    weights: Float[ndarray, "fits answers"],
    x: Float[ndarray, "answers"],
    y: Float[ndarray, "answers"],
    start: Float[ndarray, "#fits 2"],
) -> Float[ndarray, "fits 2"]:
    """Intercept and slope of many weighted logistic regressions of y in [0, 1] on the same x in [−1, 1].

    Newton's method, each step d shortened by log(1 + r) / r with r = max |d·(1, x)|, with which the penalised loss
    falls in every step (Sun and Tran-Dinh 2019, for losses like the logistic one). Raises ValueError where it does not
    converge.
    """
    terms = np.stack([np.ones_like(x), x, x * x], axis=1)
    solution = np.broadcast_to(start, (len(weights), 2)).copy()
    for _ in range(ITERATIONS):
        p = _sigmoid(solution[:, :1] + solution[:, 1:] * x)
        slope = (weights * (y - p)) @ terms[:, :2] - RIDGE * solution
        curve = (weights * p * (1 - p)) @ terms
        h00, h01, h11 = curve[:, 0] + RIDGE, curve[:, 1], curve[:, 2] + RIDGE
        step = np.stack([h11 * slope[:, 0] - h01 * slope[:, 1], h00 * slope[:, 1] - h01 * slope[:, 0]], axis=1)
        step /= (h00 * h11 - h01 * h01)[:, None]
        reach = np.abs(step).sum(axis=1, keepdims=True)
        solution += step * np.divide(np.log1p(reach), reach, out=np.ones_like(reach), where=reach > 0)
        if reach.max() < LARGEST_STEP:
            return solution
    raise ValueError(f"the length-controlled win rate did not settle in {ITERATIONS} steps; are all values finite?")


def _standardised(delta: Float[ndarray, "answers"], weights: Float[ndarray, "answers"]) -> Float[ndarray, "answers"]:
    """tanh(Δ / sd), sd over the weighted answers; 0 where lengths never differ by different amounts and nothing can be
    controlled."""
    weighed = delta[weights > 0]
    if np.ptp(weighed) == 0.0:
        return np.zeros_like(delta)
    mean = np.average(delta, weights=weights)
    spread = float(np.sqrt(np.average((delta - mean) ** 2, weights=weights)))
    return np.asarray(np.tanh(delta / spread), dtype=np.float64)


def _sigmoid(x: Float[ndarray, "*shape"]) -> Float[ndarray, "*shape"]:
    """½·(1 + tanh(x / 2)): the logistic function, without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float64)
