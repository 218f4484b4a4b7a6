"""How far annotators agree: Krippendorff's alpha and equal labels, for any number of annotators, with gaps."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Level = Literal["nominal", "interval", "ordinal"]


def krippendorff_alpha(units: Sequence[Mapping[str, float]], level: Level = "nominal") -> float | None:
    """1 for perfect agreement, 0 for chance, negative below it; None where no unit has two values, or where all values
    are equal (then nothing could have disagreed).

    A unit maps annotator to value; units with one value are ignored. `level`: how far two values differ. Krippendorff,
    "Computing Krippendorff's Alpha-Reliability", 2011.
    """
    return _alpha(_patterns(units), level)


def alpha_interval(units: Sequence[Mapping[str, float]], level: Level = "nominal") -> tuple[float, float] | None:
    """The 95% interval of alpha with other units of the same kind: alpha ± 1.96 standard errors of the delete-one
    jackknife over units with two or more values (Efron and Tibshirani 1993, chapter 11). No random number is drawn.
    None where there is no alpha, and where one unit decides whether there is one."""
    patterns = _patterns(units)
    alpha, n = _alpha(patterns, level), patterns.total()
    without = {pattern: _alpha(patterns - Counter([pattern]), level) for pattern in patterns}
    left = [(value, patterns[pattern]) for pattern, value in without.items() if value is not None]
    if alpha is None or len(left) < len(patterns):
        return None
    mean = sum(value * count for value, count in left) / n
    error = ((n - 1) / n * sum((value - mean) ** 2 * count for value, count in left)) ** 0.5
    return alpha - 1.96 * error, min(alpha + 1.96 * error, 1.0)


def _patterns(units: Iterable[Mapping[str, float]]) -> Counter[tuple[float, ...]]:
    """How many units have the same values, of those with two or more."""
    return Counter(tuple(sorted(unit.values())) for unit in units if len(unit) > 1)


def _alpha(patterns: Counter[tuple[float, ...]], level: Level) -> float | None:
    values = np.unique([value for pattern in patterns for value in pattern])
    if len(values) < 2:
        return None
    coincidences = np.zeros((len(values), len(values)))
    for pattern, count in patterns.items():
        found = np.bincount(np.searchsorted(values, pattern), minlength=len(values)).astype(float)
        coincidences += count * (np.outer(found, found) - np.diag(found)) / (len(pattern) - 1)
    totals = coincidences.sum(axis=0)
    by_chance = (np.outer(totals, totals) - np.diag(totals)) / (totals.sum() - 1)
    distances = _distances(values, totals, level)
    return float(1 - (coincidences * distances).sum() / (by_chance * distances).sum())


def _distances(values: Array, totals: Array, level: Level) -> Array:
    """The squared difference of every two values: "ordinal" counts the values between them, "nominal" is 0 or 1."""
    if level == "nominal":
        return 1.0 - np.eye(len(values))
    positions = values if level == "interval" else np.cumsum(totals) - totals / 2
    differences: Array = (positions[:, None] - positions[None, :]) ** 2
    return differences


def agreements(units: Iterable[Mapping[str, float]]) -> dict[str, list[bool]]:
    """For each annotator who shares a unit with others: whether the value is equal, for each of the others' values. A
    unit maps annotator to value."""
    found: dict[str, list[bool]] = defaultdict(list)
    for unit in units:
        for one, other in permutations(unit, 2):
            found[one].append(unit[one] == unit[other])
    return dict(found)
