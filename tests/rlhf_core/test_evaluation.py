"""`evaluation.py`: every number by hand or by its definition."""

import math

import numpy as np
import pytest

from rlhf_core.evaluation.agreement import correlation
from rlhf_core.evaluation.calibration import calibration
from rlhf_core.evaluation.diversity import distinct_n
from rlhf_core.evaluation.intervals import bootstrap_interval
from rlhf_core.evaluation.wins import wins


def test_the_bootstrap_interval_covers_the_mean_as_often_as_it_says() -> None:
    """200 samples of 60 coin tosses: 95% intervals hold the truth about 190 times."""
    generator = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        low, high = bootstrap_interval((generator.random(60) < 0.7).astype(float).tolist(), 300, trial)
        held += low <= 0.7 <= high
    assert 176 <= held <= 199


def test_the_bootstrap_interval_is_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(1).normal(size=400).tolist()
    low, high = bootstrap_interval(values, 2000, 1)
    error = 1.96 * np.std(values) / 20
    assert low == pytest.approx(np.mean(values) - error, abs=0.015)
    assert high == pytest.approx(np.mean(values) + error, abs=0.015)
    narrow = bootstrap_interval(values, 2000, 1, level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_the_bootstrap_is_a_function_of_its_seed() -> None:
    values = [0.0, 1.0, 1.0, 0.5, 0.0]
    assert bootstrap_interval(values, 50, 1) == bootstrap_interval(values, 50, 1)
    assert bootstrap_interval([3.0] * 4, 50, 1) == (3.0, 3.0)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval([], 50, 1)


def test_wins_count_the_second_and_half_a_tie() -> None:
    assert wins([1.0, 2.0, 3.0, 1.0], [2.0, 1.0, 3.0, 1.0 + 1e-12]) == [1.0, 0.0, 0.5, 0.5]
    with pytest.raises(ValueError, match="zip"):
        wins([1.0], [1.0, 2.0])


def test_distinct_n_by_hand() -> None:
    texts = ["eat the oats", "Eat the egg", "oats"]
    assert distinct_n(texts, 1) == pytest.approx(4 / 7)
    assert distinct_n(texts, 2) == pytest.approx(3 / 4)
    assert distinct_n(texts, 4) == 0.0
    assert distinct_n([], 1) == 0.0


def test_correlation_by_hand() -> None:
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    assert correlation([1, 2, 3], [1, 0, -1]) == pytest.approx(-1.0)
    assert correlation([0, 0, 1, 1], [0, 1, 0, 1]) == pytest.approx(0.0)


@pytest.mark.parametrize("constant", [0.1, 1.0, -3.3])
def test_correlation_with_something_that_does_not_vary_is_none(constant: float) -> None:
    """0.1 three times has a mean of 0.10000000000000002 in floating point, and so a deviation that is not 0."""
    assert correlation([constant] * 3, [1.0, 2.0, 3.0]) is None
    assert correlation([1.0, 2.0, 3.0], [constant] * 3) is None
    assert correlation([1.0], [2.0]) is None


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
