"""Reward against KL: fitted curves of over-optimisation. Pure functions of arrays.

Distances are d = √KL with KL in nats an answer; R is a score relative to the model that training started from (SFT), so
that R = 0 at d = 0 (Gao et al. 2022).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

LEAST_POINTS = 4
"""Points at different distances that a fit of two coefficients needs."""
LEAST_REACH = 2.0
"""Smallest ratio of the farthest to the nearest distance; points that are close together do not show the curvature."""


@dataclass(frozen=True)
class Fit:
    """R(d) fitted by least squares."""

    alpha: float
    beta: float
    r2: float
    """1 − squared error / squared deviation from the points' mean; below 0 where their mean fits better."""
    points: int


def fit_rl(kl: Sequence[float], gain: Sequence[float]) -> Fit | None:
    """R(d) = d·(α − β·log d), the form of reinforcement learning.

    `kl` in nats and `gain` relative to SFT, point by point. Points with KL ≤ 0 are left out, since R(0) = 0
    in this form. None where the data do not determine a fit: fewer than 4 different distances, the farthest less than
    twice the nearest, or gains that do not vary.
    """
    return _fit(kl, gain, lambda d: -d * np.log(d))


def fit_best_of_n(kl: Sequence[float], gain: Sequence[float]) -> Fit | None:
    """R(d) = d·(α − β·d), the form of best-of-n. Otherwise as `fit_rl`."""
    return _fit(kl, gain, lambda d: -d * d)


def _fit(
    kl: Sequence[float],
    gain: Sequence[float],
    bend: Callable[[Float[ndarray, "points"]], Float[ndarray, "points"]],
) -> Fit | None:
    distance2, r = np.asarray(kl, dtype=np.float64), np.asarray(gain, dtype=np.float64)
    if len(distance2) != len(r):
        raise ValueError(f"a fit needs a gain for each KL, not {len(r)} for {len(distance2)}")
    keep = distance2 > 0
    d, r = np.sqrt(distance2[keep]), r[keep]
    if len(np.unique(d)) < LEAST_POINTS or np.ptp(r) == 0.0 or d.max() < LEAST_REACH * d.min():
        return None
    terms = np.stack([d, bend(d)], axis=1)
    (alpha, beta), _, rank, _ = np.linalg.lstsq(terms, r, rcond=None)
    if rank < 2:
        return None
    error = float(((r - terms @ np.array([alpha, beta])) ** 2).sum())
    return Fit(float(alpha), float(beta), 1.0 - error / float(((r - r.mean()) ** 2).sum()), len(r))


def rl_curve(fit: Fit, kl: float) -> float:
    """R at this KL under a fit of `fit_rl`; 0 at KL ≤ 0."""
    d = math.sqrt(max(0.0, kl))
    return d * (fit.alpha - fit.beta * math.log(d)) if d > 0 else 0.0
