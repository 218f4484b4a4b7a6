"""Agreement of two scorers, compared fairly between two sets of answers: a set whose answers lie close together is hard
to order for anybody. Pure functions of arrays."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from rlhf_core.judges import TIE

BUCKETS = 10
"""Into how many equally full buckets the margins are put."""
DIGITS = 9
"""Of a margin; the last bits of a sum put no pair into another bucket."""

Scores = Sequence[Sequence[float]]
"""[prompts][answers]."""


def agreement_at_margins(first: Scores, second: Scores, like_first: Scores, like_second: Scores) -> float | None:
    """How often two scorers order two answers to one prompt alike (`pair_agreement`), were the margins of the second
    scorer spread as they are in another set of answers, `like`.

    Pairs are put into buckets of the second scorer's margin: ties, and the deciles of like's other margins; pairs that
    are further apart than any of like's are left out. Each bucket counts as often as like's pairs fall into it. None
    where one of them has no pair.
    """
    margins, alike = _pairs(first, second)
    wanted, _ = _pairs(like_first, like_second)
    if not len(wanted):
        return None
    apart = wanted[wanted > TIE]
    ends = np.quantile(apart, np.linspace(0, 1, BUCKETS + 1)[1:], method="inverted_cdf") if len(apart) else apart
    edges = np.concatenate([[TIE], np.unique(ends)])
    mine, theirs = np.searchsorted(edges, margins), np.searchsorted(edges, wanted)
    shares = np.bincount(theirs, minlength=len(edges)) / len(theirs)
    rates = [alike[mine == bucket].mean() if (mine == bucket).any() else None for bucket in np.flatnonzero(shares)]
    if None in rates:
        return None
    return float(np.dot(np.array(rates, dtype=np.float64), shares[shares > 0]))


def _pairs(first: Scores, second: Scores) -> tuple[Float[ndarray, "pairs"], Float[ndarray, "pairs"]]:
    """The second scorer's margin of each pair of one prompt's answers, and whether the first orders it alike (½ where
    one of them sees a tie); without those that both see as one."""
    gaps = np.array(
        [
            (a[i] - a[j], b[i] - b[j])
            for a, b in zip(first, second, strict=True)
            for i, j in combinations(range(len(a)), 2)
        ],
        dtype=np.float64,
    ).reshape(-1, 2)
    orders = np.where(np.abs(gaps) <= TIE, 0.0, np.sign(gaps))
    kept = (orders != 0).any(axis=1)
    return np.abs(gaps[kept, 1]).round(DIGITS), 0.5 * (1 + orders[kept].prod(axis=1))
