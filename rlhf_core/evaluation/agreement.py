"""Agreement of two scorers on pairs of answers to one prompt, also at given margins. Pure functions of arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from rlhf_core.evaluation.intervals import clustered_interval
from rlhf_core.evaluation.judges import TIE

BUCKETS = 10
"""Number of equally full buckets of margins."""
DIGITS = 9
"""Of a margin; the last bits of a sum put no pair into another bucket."""

Scores = Sequence[Sequence[float]]
"""[prompts][answers]."""


@dataclass(frozen=True)
class Agreement:
    """The share of pairs that two scorers order alike, and its 95% interval over prompts."""

    share: float
    low: float
    high: float
    pairs: int

    @property
    def interval(self) -> list[float]:
        """[low, high]."""
        return [self.low, self.high]


def pair_agreement(first: Scores, second: Scores, resamples: int, seed: int) -> Agreement | None:
    """How often two scorers order two answers to one prompt alike; both [prompts][answers].

    Every two answers of a prompt are a pair. A tie (within 1e-9) of one scorer counts half; a tie of both, such as two
    identical answers, is left out. Prompts may have different numbers of answers, and whole prompts are resampled. None
    where no pair is left. Raises ValueError where the two differ in shape.
    """
    pairs = _pairs(first, second)
    if not len(pairs.alike):
        return None
    low, high = clustered_interval(pairs.alike, pairs.owners, resamples, seed)
    return Agreement(float(pairs.alike.mean()), low, high, len(pairs.alike))


def agreement_at_margins(first: Scores, second: Scores, like_first: Scores, like_second: Scores) -> float | None:
    """`pair_agreement`, reweighted to the margins of another set of answers, `like`.

    Pairs are put into buckets of the second scorer's margin: ties, and the deciles of like's other margins; pairs with
    larger margins than any of like's are left out. Each bucket has the weight of like's pairs in it. None where a
    bucket with weight has no pair.
    """
    pairs, wanted = _pairs(first, second), _pairs(like_first, like_second).margins
    if not len(wanted):
        return None
    apart = wanted[wanted > TIE]
    ends = np.quantile(apart, np.linspace(0, 1, BUCKETS + 1)[1:], method="inverted_cdf") if len(apart) else apart
    edges = np.concatenate([[TIE], np.unique(ends)])
    mine, theirs = np.searchsorted(edges, pairs.margins), np.searchsorted(edges, wanted)
    shares = np.bincount(theirs, minlength=len(edges)) / len(theirs)
    groups = [pairs.alike[mine == bucket] for bucket in np.flatnonzero(shares)]
    if not all(map(len, groups)):
        return None
    return float(np.dot([group.mean() for group in groups], shares[shares > 0]))


class _Pairs(NamedTuple):
    """Every two answers to one prompt, without the ties of both scorers."""

    owners: Int[ndarray, "pairs"]
    """The place of the prompt."""
    margins: Float[ndarray, "pairs"]
    """The absolute difference of the second scorer's scores."""
    alike: Float[ndarray, "pairs"]
    """1 where both scorers order them alike, ½ for a tie of one scorer, 0 else."""


def _pairs(first: Scores, second: Scores) -> _Pairs:
    rows = []
    for prompt, (a, b) in enumerate(zip(first, second, strict=True)):
        if len(a) != len(b):
            raise ValueError(f"prompt {prompt}: {len(a)} scores of one scorer and {len(b)} of the other")
        rows += [(prompt, a[i] - a[j], b[i] - b[j]) for i, j in combinations(range(len(a)), 2)]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    orders = np.where(np.abs(table[:, 1:]) <= TIE, 0.0, np.sign(table[:, 1:]))
    kept = (orders != 0).any(axis=1)
    margins = np.abs(table[kept, 2]).round(DIGITS)
    return _Pairs(table[kept, 0].astype(int), margins, 0.5 * (1 + orders[kept].prod(axis=1)))
