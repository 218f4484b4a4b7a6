"""The best score at each KL: the optimum π_ref·exp(R/β)/Z of the KL-regularised objective, estimated by multiple
importance sampling. Pure functions of arrays.

No policy has a higher expected R at the same KL to π_ref than this optimum has (Korbak et al. 2022; Rafailov et al.
2023, appendix A.1), so it is the ceiling of PPO's frontier.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

LEAST_EFFECTIVE = 4.0
"""Effective samples a prompt, below which an estimate is left out. With few of them KL and score are both too low, and
the point stays near the true curve."""
BETAS = tuple(np.geomspace(8.0, 0.04, 24).tolist())
"""Costs of one nat of KL, in units of R."""

PerSample = Float[ndarray, "prompts samples"]


@dataclass(frozen=True)
class Draws:
    """Samples of several proposals, the same number of each for every prompt."""

    scores: PerSample
    """R: the reward model's score of each sample, in standard deviations of the SFT model's scores."""
    log_ratios: Float[ndarray, "prompts samples proposals"]
    """log π_k(y) − log π_ref(y) under every proposal, in nats; 0 for π_ref itself."""
    counts: Sequence[int]
    """Samples of each proposal for a prompt; their sum is the number of samples."""


@dataclass(frozen=True)
class Optimum:
    """The optimum for one β: means over prompts."""

    beta: float
    kl: float
    """Nats per answer."""
    effective_samples: float
    """1 / Σ w², a prompt."""
    weights: PerSample
    """Of each sample; a row sums to 1."""

    def mean(self, values: PerSample) -> float:
        """The mean of a value of the samples under the optimum."""
        return float((self.weights * values).sum(axis=1).mean())


def log_importance(draws: Draws) -> PerSample:
    """log of π_ref(y) / Σ_k share_k·π_k(y), share_k = counts_k / Σ counts: the balance heuristic (Veach and Guibas
    1995). It is at most −log share_ref, so that no weight is larger than exp(R/β) / share_ref.

    Raises ValueError where the counts do not fit the samples.
    """
    counts = np.asarray(draws.counts, dtype=np.float64)
    if draws.log_ratios.shape != (*draws.scores.shape, len(counts)) or counts.sum() != draws.scores.shape[1]:
        raise ValueError(
            f"{draws.scores.shape} scores, {draws.log_ratios.shape} ratios and {draws.counts} samples of each proposal "
            "do not fit together"
        )
    used = counts > 0
    return -_log_sum_exp(draws.log_ratios[..., used] + np.log(counts[used] / counts.sum()))


def optimum(draws: Draws, beta: float) -> Optimum:
    """π_ref·exp(R/β)/Z: with w = π_ref·exp(R/β) / mixture, log Z is the log of the mean weight, and the KL is
    E[R]/β − log Z with E under the normalised weights; prompt by prompt, then averaged.

    Raises ValueError for β ≤ 0, and as `log_importance`.
    """
    if not beta > 0:
        raise ValueError(f"β must be above 0, not {beta}")
    tilt = draws.scores / beta
    logs = log_importance(draws) + tilt
    total = _log_sum_exp(logs)[:, None]
    weights = np.exp(logs - total)
    kls = (weights * tilt).sum(axis=1) - (total[:, 0] - np.log(logs.shape[1]))
    return Optimum(beta, float(kls.mean()), float((1.0 / (weights**2).sum(axis=1)).mean()), weights)


def ceiling(draws: Draws) -> list[Optimum]:
    """The optimum for each β that the samples determine (`LEAST_EFFECTIVE`), by rising KL; from the first β on that
    they do not determine, none is listed."""
    found: list[Optimum] = []
    for beta in sorted(BETAS, reverse=True):
        point = optimum(draws, beta)
        if point.effective_samples < LEAST_EFFECTIVE:
            break
        found.append(point)
    return sorted(found, key=lambda point: point.kl)


def share_of_optimum(gain: float, kl: float, kls: Sequence[float], gains: Sequence[float]) -> float | None:
    """A model's gain over the SFT model as a share of the optimum's at the same KL (nats).

    Both gains are relative to the SFT model, and (0, 0) is a point of the ceiling. The optimum's score is concave in
    its KL, so that the straight line between two of its points is not above it. None for a KL of 0 and beyond the last
    point. Points whose estimated KL is not above 0 are left out.
    """
    line = [(0.0, 0.0), *(point for point in zip(kls, gains, strict=True) if point[0] > 0)]
    if not 0 < kl <= line[-1][0]:
        return None
    best = float(np.interp(kl, [point[0] for point in line], [point[1] for point in line]))
    return gain / best if best > 0 else None


def _log_sum_exp(values: Float[ndarray, "*shape last"]) -> Float[ndarray, "*shape"]:
    """Over the last axis, without overflow."""
    most = values.max(axis=-1)
    found: Float[ndarray, "*shape"] = most + np.log(np.exp(values - most[..., None]).sum(axis=-1))
    return found
