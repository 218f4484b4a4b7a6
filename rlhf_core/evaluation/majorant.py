"""The least concave majorant of points of KL and score that never falls. Pure functions of arrays.

Answering with one of two models at random reaches at least the straight line between their points: the score of the
mixture is linear in the probability, and its KL is at most linear, because KL is convex. So the line is straight in KL,
not in √KL. It never falls, since a model with less KL than allowed may always be used.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray


def vertices(
    kl: Float[ndarray, "*rows points"], score: Float[ndarray, "*rows points"]
) -> Bool[ndarray, "*rows points"]:
    """Which points are vertices of the majorant, row by row; of equal points the first.

    A point is one where the smallest slope from the points to its left is above the largest slope to its right and
    above 0.
    """
    right, up = (values[..., None, :] - values[..., :, None] for values in (kl, score))  # from point i to point j
    slope = np.divide(up, right, out=np.zeros_like(up), where=right != 0)
    ahead = np.where(right > 0, slope, 0.0).max(axis=-1, initial=0.0)
    behind = np.where(right < 0, slope, np.inf).min(axis=-1, initial=np.inf)
    earlier = np.tri(kl.shape[-1], k=-1, dtype=bool)
    beaten = (right == 0) & ((up > 0) | ((up == 0) & earlier))
    found: Bool[ndarray, "*rows points"] = (behind > ahead) & ~beaten.any(axis=-1)
    return found


def read_line(
    target: Float[ndarray, "rows"],
    kl: Float[ndarray, "rows points"],
    score: Float[ndarray, "rows points"],
    chosen: Bool[ndarray, "rows points"],
) -> Float[ndarray, "rows"]:
    """The height at `target` (nats) of the line through the chosen points in the order of their KL, row by row; beyond
    the first and the last of them that point's score. NaN without a chosen point."""
    order = np.argsort(np.where(chosen, kl, np.inf), axis=1, kind="stable")
    x, y, used = (np.take_along_axis(values, order, axis=1) for values in (kl, score, chosen))
    height = np.where(used[:, 0], y[:, 0], np.nan)
    for place in range(1, x.shape[1]):
        a, width = x[:, place - 1], x[:, place] - x[:, place - 1]
        share = np.clip(np.divide(target - a, width, out=np.ones_like(a), where=width > 0), 0.0, 1.0)
        inside = used[:, place] & (target >= a)
        height = np.where(inside, y[:, place - 1] + share * (y[:, place] - y[:, place - 1]), height)
    return height


def line_of(kl: Sequence[float], score: Sequence[float]) -> list[int]:
    """The places of the majorant's vertices, by rising KL. Raises ValueError where the lengths differ."""
    if len(kl) != len(score):
        raise ValueError(f"a majorant needs a score for each KL, not {len(score)} for {len(kl)}")
    if not len(kl):
        return []
    found = vertices(np.asarray(kl, dtype=np.float64), np.asarray(score, dtype=np.float64))
    return sorted(np.flatnonzero(found).tolist(), key=lambda place: kl[place])


def neighbours(target: float, kl: Sequence[float], score: Sequence[float]) -> tuple[int, int] | None:
    """The places of the vertices next to `target` (nats) on both sides; the last vertex twice beyond it. None outside
    the KL of the points: nothing is extrapolated."""
    line = line_of(kl, score)
    if not line or not min(kl) <= target <= max(kl):
        return None
    below = [place for place in line if kl[place] <= target]
    above = [place for place in line if kl[place] >= target]
    return below[-1], (above or below[-1:])[0]


def majorant_at(target: float, kl: Sequence[float], score: Sequence[float]) -> float | None:
    """The majorant at `target` (nats); flat from its last vertex to the largest KL, None outside the points' KL."""
    found = neighbours(target, kl, score)
    if found is None:
        return None
    a, b = found
    return float(np.interp(target, [kl[a], kl[b]], [score[a], score[b]])) if kl[b] > kl[a] else float(score[a])
