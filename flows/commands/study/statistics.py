"""Means over training seeds, with an interval that contains the variance between them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from scipy import stats

NORMAL = 1.959964
"""Half the width of a 95% interval, in standard errors."""
METHOD = (
    "Mean over training seeds with a 95% interval. Its variance is s²/n, with s² the variance between n seeds, plus "
    "the squared standard error over the held-out prompts, which all seeds share. The quantile is Student's t with "
    "Welch–Satterthwaite degrees of freedom: with three seeds and no variance between prompts it is t(2) = 4.30, so "
    "intervals of three seeds are wide. With one seed the interval is over prompts only, and says nothing about "
    "another seed."
)


@dataclass(frozen=True)
class Summary:
    """A mean over n seeds, and its 95% interval; None where there is none: one seed, and no interval over prompts."""

    mean: float
    low: float | None
    high: float | None
    n: int


def summarise(values: Sequence[float], errors: Sequence[float | None]) -> Summary | None:
    """`values` are those of each seed, `errors` their standard errors over prompts (None: not known, counted as 0).
    None without a value."""
    if not values:
        return None
    n, mean = len(values), fmean(values)
    between = variance(values) / n if n > 1 else 0.0
    prompts = fmean((error or 0.0) ** 2 for error in errors)
    if n == 1 and not prompts:
        return Summary(mean, None, None, 1)
    quantile = NORMAL
    if between:  # estimated with n − 1 degrees of freedom; the variance over prompts is taken as known
        quantile = float(stats.t.ppf(0.975, (n - 1) * ((between + prompts) / between) ** 2))
    half = quantile * math.sqrt(between + prompts)
    return Summary(mean, mean - half, mean + half, n)


def standard_error(interval: Sequence[float] | None) -> float | None:
    """Of a 95% interval."""
    return None if not interval else (interval[1] - interval[0]) / (2 * NORMAL)
