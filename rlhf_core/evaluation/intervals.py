"""Means with bootstrap intervals, and differences of two models. Pure functions of arrays.

Prompts are resampled; the answers to a prompt are averaged before, or stay together. An interval is the variation with
other prompts of the same kind. The variation between training seeds is not in it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from numpy.typing import ArrayLike

from rlhf_core.determinism import stream

CHUNK = 2**20
"""Numbers drawn at a time; no result depends on it."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, its 95% interval, and the spread over sampling seeds."""

    mean: float
    low: float
    high: float
    spread: float | None
    """Standard deviation (n − 1) of the means of the sampling seeds; None with one seed."""

    @property
    def interval(self) -> list[float]:
        """[low, high]."""
        return [self.low, self.high]


def estimate(values: ArrayLike, resamples: int, seed: int) -> Estimate:
    """Mean, percentile-bootstrap interval and spread of `values`, [prompts] or [prompts, seeds].

    Raises ValueError without values, or where one of them is not finite.
    """
    table = _table(values)
    means = table.mean(axis=1)
    low, high = bootstrap_interval(means, resamples, seed)
    spread = float(table.mean(axis=0).std(ddof=1)) if table.shape[1] > 1 else None
    return Estimate(float(means.mean()), low, high, spread)


def estimate_difference(first: ArrayLike, second: ArrayLike, resamples: int, seed: int) -> Estimate:
    """`second` − `first` of two models on the same prompts, paired by prompt: each [prompts] or [prompts, seeds].

    The difference is taken prompt by prompt, so that a prompt's difficulty for both models is not in the interval. With
    different numbers of seeds the spread is None. Raises ValueError for different prompts.
    """
    a, b = _table(first), _table(second)
    if len(a) != len(b):
        raise ValueError(f"a paired difference needs the same prompts, not {len(a)} and {len(b)}")
    if a.shape == b.shape:
        return estimate(b - a, resamples, seed)
    return estimate(b.mean(axis=1) - a.mean(axis=1), resamples, seed)


def estimate_ratio(
    numerators: Sequence[float] | Float[ndarray, "prompts"],
    denominators: Sequence[float] | Float[ndarray, "prompts"],
    resamples: int,
    seed: int,
) -> Estimate:
    """Σ numerators / Σ denominators over prompts, such as a loss in nats over tokens; prompts are resampled. Raises
    ValueError as `bootstrap_interval` does, and where the denominators sum to 0."""
    above, below = _one_a_prompt(numerators), _one_a_prompt(denominators)
    if len(above) != len(below) or below.sum() == 0.0:
        raise ValueError("a ratio needs as many denominators as numerators, and some that are not 0")
    return Estimate(float(above.sum() / below.sum()), *_ratio_interval(above, below, resamples, seed), None)


def bootstrap_interval(
    values: Sequence[float] | Float[ndarray, "prompts"], resamples: int, seed: int
) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean of `values`, one value a prompt (Efron and Tibshirani
    1993, chapter 13).

    Equal seeds resample the same prompts. Equal values give an interval of width 0. Raises ValueError without values,
    or where one is not finite.
    """
    data = _one_a_prompt(values)
    return _ratio_interval(data, np.ones_like(data), resamples, seed)


def clustered_interval(
    values: Sequence[float] | Float[ndarray, "values"],
    prompts: Sequence[int] | Int[ndarray, "values"],
    resamples: int,
    seed: int,
) -> tuple[float, float]:
    """The interval of the mean of all `values`, where prompts have different numbers of them.

    `prompts` is the prompt of each value (any numbers). Whole prompts are resampled, each with all its values. Raises
    ValueError as `bootstrap_interval` does.
    """
    data = _one_a_prompt(values)
    if len(data) != len(prompts):
        raise ValueError(f"{len(data)} values need as many prompts, not {len(prompts)}")
    owner = np.unique(np.asarray(prompts), return_inverse=True)[1]
    return _ratio_interval(np.bincount(owner, data), np.bincount(owner).astype(np.float64), resamples, seed)


def bounds(name: str, ends: Sequence[float] | None) -> dict[str, float | None]:
    """The ends of an interval as figures `NAME_low` and `NAME_high`: DVC and MLflow drop lists. None if unknown."""
    low, high = ends or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def resampled(prompts: int, resamples: int, seed: int) -> Iterator[Int[ndarray, "some prompts"]]:
    """Places of prompts drawn with replacement, `resamples` rows in all, some at a time."""
    generator = stream(seed)
    rows = max(1, CHUNK // prompts)
    for start in range(0, resamples, rows):
        yield generator.integers(0, prompts, (min(rows, resamples - start), prompts))


def resample_counts(places: Int[ndarray, "resamples prompts"]) -> Float[ndarray, "resamples prompts"]:
    """How often each prompt occurs in each resample."""
    rows, prompts = places.shape
    flat = places + np.arange(rows)[:, None] * prompts
    return np.bincount(flat.reshape(-1), minlength=rows * prompts).reshape(rows, prompts).astype(np.float64)


def percentile_interval(means: Float[ndarray, "resamples"]) -> tuple[float, float]:
    """The central 95% of the means of resamples."""
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _ratio_interval(
    above: Float[ndarray, "prompts"], below: Float[ndarray, "prompts"], resamples: int, seed: int
) -> tuple[float, float]:
    """Of Σ above / Σ below, prompts resampled."""
    found = [above[p].sum(axis=1) / below[p].sum(axis=1) for p in resampled(len(above), resamples, seed)]
    return percentile_interval(np.concatenate(found))


def _one_a_prompt(values: ArrayLike) -> Float[ndarray, "prompts"]:
    if np.ndim(values) > 1:
        raise ValueError(f"an interval needs one value a prompt, not shape {np.shape(values)}; use `estimate`")
    return _table(values)[:, 0]


def _table(values: ArrayLike) -> Float[ndarray, "prompts seeds"]:
    """`values` as [prompts, seeds]."""
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("an interval needs at least one value")
    if data.ndim not in (1, 2):
        raise ValueError(f"values must be [prompts] or [prompts, seeds], not of shape {data.shape}")
    if not np.isfinite(data).all():
        raise ValueError("an interval needs finite values; leave out what is not known")
    return data[:, None] if data.ndim == 1 else data
