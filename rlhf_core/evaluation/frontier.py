"""PPO's lead over another model at that model's KL to SFT, with its interval. Pure functions of arrays."""

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from rlhf_core.determinism import stream
from rlhf_core.evaluation.intervals import Estimate, percentile_interval, resample_counts, resampled
from rlhf_core.evaluation.majorant import read_line, vertices

SPLIT = 1
"""Second number of the random stream that divides the prompts; the resamples have the first alone."""


def lead_at_equal_kl(
    curve_kl: Float[ndarray, "points prompts"],
    curve: Float[ndarray, "points prompts"],
    kl: Float[ndarray, "prompts"],
    scores: Float[ndarray, "prompts"],
    resamples: int,
    seed: int,
) -> Estimate | None:
    """PPO's frontier at another model's KL minus that model's score, with its 95% interval.

    The frontier is the least concave majorant, in KL and not in √KL, of the points of a run (SFT, snapshots,
    interpolated policies, policy): answering with one of two models at random reaches at least the straight line
    between them, because KL is convex. It is flat from its best point to the largest KL.

    The best of noisy points looks better than it is. So the prompts are divided in two halves, at random: one half
    chooses the vertices, the line through them is read with the other half, both ways round, and the mean is taken
    (cross-fitting). Every bootstrap resample does all of this with the same halves, so that no prompt is in both.

    Args:
        curve_kl: exact KL (nats an answer) of each point, prompt by prompt.
        curve: score of each point.
        kl: of the other model; a KL that is known, such as best-of-n's, is the same for all prompts.
        scores: of the other model.
        resamples: how many times prompts are resampled.
        seed: decides halves and resamples.

    Returns:
        None where no point reaches the other model's KL, and for fewer than two prompts. Resamples in which none does
        are left out of the interval.
    """
    columns, prompts = np.vstack([curve_kl, curve, kl, scores]), len(kl)
    half = stream(seed, SPLIT).permutation(prompts) % 2 == 0
    (found,) = _leads(np.ones((1, prompts)), columns, half)
    if np.isnan(found):
        return None
    leads = np.concatenate([_leads(resample_counts(p), columns, half) for p in resampled(prompts, resamples, seed)])
    known = leads[~np.isnan(leads)]
    return Estimate(float(found), *percentile_interval(known if len(known) else np.array([found])), None)


def _leads(
    counts: Float[ndarray, "rows prompts"], columns: Float[ndarray, "columns prompts"], half: Bool[ndarray, "prompts"]
) -> Float[ndarray, "rows"]:
    """The cross-fitted lead in each resample; NaN where the points do not reach the KL, or a half is empty."""
    whole, first, second = (_means(counts * part, columns) for part in (np.ones_like(half), half, ~half))
    points = (len(columns) - 2) // 2
    beyond = whole[:, -2] > whole[:, :points].max(axis=1)
    lead = np.zeros(len(counts))
    for choosing, reading in ((first, second), (second, first)):
        chosen = vertices(choosing[:, :points], choosing[:, points:-2])
        height = read_line(reading[:, -2], reading[:, :points], reading[:, points:-2], chosen)
        lead += 0.5 * (height - reading[:, -1])
    lead[beyond] = np.nan
    return lead


def _means(
    counts: Float[ndarray, "rows prompts"], columns: Float[ndarray, "columns prompts"]
) -> Float[ndarray, "rows columns"]:
    """The mean of each column over the prompts as often as each is counted; NaN where none is."""
    totals = counts.sum(axis=1, keepdims=True)
    sums = counts @ columns.T
    means: Float[ndarray, "rows columns"] = np.divide(sums, totals, out=np.full_like(sums, np.nan), where=totals > 0)
    return means
