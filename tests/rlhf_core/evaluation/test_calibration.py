"""`calibration.py` by hand."""

import math
from itertools import pairwise

import numpy as np
import pytest

from rlhf_core.evaluation.calibration import accuracy_by_margin, calibration, score_histogram
from rlhf_core.evaluation.intervals import clustered_interval


def test_calibration_by_hand() -> None:
    """Four pairs at 60% of which the favourite wins two, and one pair at 95% that it wins."""
    sixty, ninety_five = math.log(0.6 / 0.4), math.log(0.95 / 0.05)
    bins, error = calibration([sixty, sixty, -sixty, -sixty, ninety_five], bins=5)
    assert [(round(b.low, 2), round(b.high, 2), b.pairs) for b in bins] == [(0.6, 0.7, 4), (0.9, 1.0, 1)]
    assert [b.observed for b in bins] == [0.5, 1.0]
    assert [b.predicted for b in bins] == pytest.approx([0.6, 0.95])
    assert error == pytest.approx((4 * 0.1 + 1 * 0.05) / 5)


def test_calibration_counts_an_undecided_pair_half_and_a_sure_one_in_the_last_bin() -> None:
    bins, error = calibration([0.0, 500.0], bins=10)
    assert [(b.predicted, b.observed, b.pairs) for b in bins] == [(0.5, 0.5, 1), (1.0, 1.0, 1)]
    assert bins[-1].high == 1.0
    assert error == 0.0
    assert calibration([]) == ([], 0.0)


def test_accuracy_by_margin_by_hand() -> None:
    """Ten pairs of two prompts in five buckets of two; the pairs of small margin are ordered wrongly."""
    margins = [0.5, 0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 1.0, 0.6]
    right = [float(margin > 0.35) for margin in margins]
    found = accuracy_by_margin(right, margins, [0, 1] * 5, 200, 1)
    assert [(b.low, b.high, b.pairs) for b in found] == [
        (0.1, 0.2, 2),
        (0.3, 0.4, 2),
        (0.5, 0.6, 2),
        (0.7, 0.8, 2),
        (0.9, 1.0, 2),
    ]
    assert [b.accuracy for b in found] == [0.0, 0.5, 1.0, 1.0, 1.0]


def test_equal_margins_share_a_bucket() -> None:
    found = accuracy_by_margin([1, 0, 1, 1, 0.5], [1.0, 1.0, 1.0, 1.0, 3.0], range(5), 200, 1)
    assert [(b.low, b.high, b.accuracy, b.pairs) for b in found] == [(1.0, 1.0, 0.75, 4), (3.0, 3.0, 0.5, 1)]
    assert sum(b.pairs for b in accuracy_by_margin([1.0] * 9, [2.0] * 9, range(9), 100, 1)) == 9


def test_margins_that_differ_by_rounding_are_equal() -> None:
    found = accuracy_by_margin([1, 1, 1, 1, 0], [2.4 - 0.8, 1.6, 2.6 - 1.0, 0.1, 3.0], range(5), 100, 1)
    assert [(b.low, b.high, b.pairs) for b in found] == [(0.1, 0.1, 1), (1.6, 1.6, 3), (3.0, 3.0, 1)]


def test_buckets_are_resampled_by_prompt() -> None:
    generator = np.random.default_rng(0)
    margins, right = generator.exponential(size=1000), generator.integers(0, 2, 1000).astype(float)
    owners = [i // 4 for i in range(1000)]
    found = accuracy_by_margin(right, margins, owners, 300, 2)
    assert [b.pairs for b in found] == [200] * 5
    assert all(before.high < after.low for before, after in pairwise(found))
    inside = (margins >= found[1].low) & (margins <= found[1].high)
    expected = clustered_interval(right[inside], np.array(owners)[inside], 300, 2)
    assert (found[1].accuracy_low, found[1].accuracy_high) == expected
    assert found[1].accuracy_low < found[1].accuracy < found[1].accuracy_high


def test_a_histogram_of_both_sides() -> None:
    found = score_histogram([1.0, 4.0, 4.0, 4.0], [0.0, 1.0], bins=4)
    assert [(b.low, b.high) for b in found] == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    assert [b.chosen for b in found] == [0.0, 0.25, 0.0, 0.75]
    assert [b.rejected for b in found] == [0.5, 0.5, 0.0, 0.0]


def test_a_histogram_of_one_score_and_of_none() -> None:
    found = score_histogram([2.0, 2.0], [2.0, 2.0])
    assert len(found) == 20
    assert sum(b.chosen for b in found) == sum(b.rejected for b in found) == 1.0
    with pytest.raises(ValueError, match="at least one pair"):
        score_histogram([], [])
