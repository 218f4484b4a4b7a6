"""Whether two scorers say the same: on pairs of one prompt's answers, and as a correlation. Pure functions of
arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rlhf_core.evaluation.intervals import clustered_interval
from rlhf_core.judges import TIE


@dataclass(frozen=True)
class Agreement:
    """The share of pairs that two scorers order alike, and its 95% interval over prompts."""

    share: float
    low: float
    high: float
    pairs: int

    @property
    def interval(self) -> list[float]:
        """[low, high], as tables have it."""
        return [self.low, self.high]


def pair_agreement(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], resamples: int, seed: int
) -> Agreement | None:
    """How often two scorers order two answers to one prompt alike; both [prompts][answers].

    Every two answers of a prompt are a pair. One that only one of the scorers sees as a tie (within 1e-9) counts half;
    one that both do, such as two identical answers, is left out: there is no order to agree on. Prompts may have
    different numbers of answers, and whole prompts are resampled. None where no pair is left. Raises ValueError where
    the two differ in shape.
    """
    alike, owners = [], []
    for prompt, (a, b) in enumerate(zip(first, second, strict=True)):
        if len(a) != len(b):
            raise ValueError(f"prompt {prompt}: {len(a)} scores of one scorer and {len(b)} of the other")
        for i, j in combinations(range(len(a)), 2):
            orders = _order(a[i], a[j]), _order(b[i], b[j])
            if orders != (0, 0):
                alike.append(0.5 * (1 + orders[0] * orders[1]))
                owners.append(prompt)
    if not alike:
        return None
    low, high = clustered_interval(alike, owners, resamples, seed)
    return Agreement(sum(alike) / len(alike), low, high, len(alike))


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's correlation; None where one side does not vary or there are fewer than two values."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(a) < 2 or np.ptp(a) == 0.0 or np.ptp(b) == 0.0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _order(left: float, right: float) -> int:
    """1, 0 (a tie) or −1."""
    return 0 if abs(left - right) <= TIE else 1 if left > right else -1
