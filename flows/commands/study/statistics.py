"""Means over training seeds, with an interval that contains the variance between them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from scipy import stats

LEVEL = 0.95
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
    n = len(values)
    between = variance(values) / n if n > 1 else 0.0
    prompts = fmean((error or 0.0) ** 2 for error in errors)
    if n == 1 and not prompts:
        return Summary(values[0], None, None, 1)
    half = _quantile(between, prompts, n) * math.sqrt(between + prompts)
    mean = fmean(values)
    return Summary(mean, mean - half, mean + half, n)


def _quantile(between: float, prompts: float, n: int) -> float:
    """Student's t for a sum of a variance estimated with n − 1 degrees of freedom and one taken as known."""
    if n == 1 or not between:
        return NORMAL
    freedom = (n - 1) * ((between + prompts) / between) ** 2
    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))


def standard_error(interval: Sequence[float] | None) -> float | None:
    """Of a 95% interval."""
    return None if not interval else (interval[1] - interval[0]) / (2 * NORMAL)
