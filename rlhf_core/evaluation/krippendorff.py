"""How far annotators agree: Krippendorff's alpha and equal labels, for any number of annotators, with gaps."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations

import numpy as np


def krippendorff_alpha(units: Sequence[Mapping[str, float]]) -> float | None:
    """1 for perfect agreement, 0 for chance, negative below it; None where no unit has two values, or where all values
    are equal (then nothing could have disagreed).

    A unit maps annotator to value; units with one value are ignored, values are equal or not (nominal). Krippendorff,
    "Computing Krippendorff's Alpha-Reliability", 2011.
    """
    return _alpha(_patterns(units))


def alpha_interval(units: Sequence[Mapping[str, float]]) -> tuple[float, float] | None:
    """The 95% interval of alpha with other units of the same kind: alpha ± 1.96 standard errors of the delete-one
    jackknife over units with two or more values (Efron and Tibshirani 1993, chapter 11). No random number is drawn.
    None where there is no alpha, and where one unit decides whether there is one."""
    patterns = _patterns(units)
    alpha, n = _alpha(patterns), patterns.total()
    without = {pattern: _alpha(patterns - Counter([pattern])) for pattern in patterns}
    left = [(value, patterns[pattern]) for pattern, value in without.items() if value is not None]
    if alpha is None or len(left) < len(patterns):
        return None
    mean = sum(value * count for value, count in left) / n
    error = ((n - 1) / n * sum((value - mean) ** 2 * count for value, count in left)) ** 0.5
    return alpha - 1.96 * error, min(alpha + 1.96 * error, 1.0)


def _patterns(units: Iterable[Mapping[str, float]]) -> Counter[tuple[float, ...]]:
    """How many units have the same values, of those with two or more."""
    return Counter(tuple(sorted(unit.values())) for unit in units if len(unit) > 1)


def _alpha(patterns: Counter[tuple[float, ...]]) -> float | None:
    values = np.unique([value for pattern in patterns for value in pattern])
    if len(values) < 2:
        return None
    coincidences = np.zeros((len(values), len(values)))
    for pattern, count in patterns.items():
        found = np.bincount(np.searchsorted(values, pattern), minlength=len(values)).astype(float)
        coincidences += count * (np.outer(found, found) - np.diag(found)) / (len(pattern) - 1)
    totals = coincidences.sum(axis=0)
    by_chance = (np.outer(totals, totals) - np.diag(totals)) / (totals.sum() - 1)
    differs = 1.0 - np.eye(len(values))
    return float(1 - (coincidences * differs).sum() / (by_chance * differs).sum())


def agreements(units: Iterable[Mapping[str, float]]) -> dict[str, list[bool]]:
    """For each annotator who shares a unit with others: whether the value is equal, for each of the others' values. A
    unit maps annotator to value."""
    found: dict[str, list[bool]] = defaultdict(list)
    for unit in units:
        for one, other in permutations(unit, 2):
            found[one].append(unit[one] == unit[other])
    return dict(found)
