"""PPO's lead over another model at that model's KL to SFT, with its interval. Pure functions of arrays."""

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from rlhf_core.evaluation.intervals import Estimate, resample_counts, resampled
from rlhf_core.evaluation.overoptimisation import at_kl


def lead_at_equal_kl(
    curve_kl: Float[ndarray, "snapshots prompts"],
    curve: Float[ndarray, "snapshots prompts"],
    kl: Float[ndarray, "prompts"],
    scores: Float[ndarray, "prompts"],
    resamples: int,
    seed: int,
) -> Estimate | None:
    """Score of a run's snapshots at another model's KL (`at_kl`) minus that model's score, with its 95% interval.

    KL (nats an answer) and score of each snapshot and of the model, prompt by prompt; prompts are resampled for all of
    them together. An exact KL is the same for all prompts. Resamples in which the snapshots do not reach the model's KL
    are left out. None where they do not reach it with all prompts.
    """
    columns = np.vstack([curve_kl, curve, kl, scores])

    def lead(means: Float[ndarray, "columns"]) -> float | None:
        kls, values = means[:-2].reshape(2, -1)
        reached = at_kl(float(means[-2]), kls.tolist(), values.tolist())
        return None if reached is None else reached - float(means[-1])

    found = lead(columns.mean(axis=1))
    if found is None:
        return None
    leads = [lead(means) for means in _resampled_means(columns, resamples, seed)]
    low, high = np.quantile([value for value in leads if value is not None] or [found], [0.025, 0.975])
    return Estimate(found, float(low), float(high), None)


def _resampled_means(
    columns: Float[ndarray, "columns prompts"], resamples: int, seed: int
) -> Float[ndarray, "resamples columns"]:
    """The mean of each column in each resample of the prompts, the same prompts for all columns."""
    prompts = columns.shape[1]
    return np.concatenate(
        [resample_counts(places) @ columns.T / prompts for places in resampled(prompts, resamples, seed)]
    )
