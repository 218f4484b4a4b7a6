"""Intervals over training seeds."""

import numpy as np
import pytest
from scipy import stats

from flows.commands.study.tables import NORMAL, Summary, standard_error, summarise


def test_without_errors_over_prompts_it_is_the_t_interval() -> None:
    values = [1.0, 2.0, 4.0]
    found = summarise(values, [None, None, None])
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high))


def test_one_seed_has_the_interval_over_prompts_only() -> None:
    found = summarise([2.0], [0.5])
    assert found == Summary(2.0, 2.0 - 0.5 * NORMAL, 2.0 + 0.5 * NORMAL, 1)
    assert summarise([2.0], [None]) == Summary(2.0, None, None, 1)
    assert summarise([], []) is None


def test_equal_seeds_keep_the_interval_over_prompts() -> None:
    found = summarise([2.0, 2.0, 2.0], [0.5, 0.5, 0.5])
    assert found is not None
    assert found.high == pytest.approx(2.0 + 0.5 * NORMAL)
    assert standard_error([2.0 - 0.5 * NORMAL, 2.0 + 0.5 * NORMAL]) == pytest.approx(0.5)
    assert standard_error(None) is None


@pytest.mark.parametrize(("between", "prompts"), [(1.0, 0.0), (1.0, 0.5), (0.3, 1.0)])
def test_it_covers_the_truth(between: float, prompts: float) -> None:
    """Three seeds, whose prompts have one error in common: at least 93% of nominal 95% over 4,000 simulations."""
    generator = np.random.default_rng(1)
    rounds = 4000
    scores = generator.normal(0, between, (rounds, 3)) + generator.normal(0, prompts, (rounds, 1))
    found = [summarise(list(row), [prompts] * 3) for row in scores]
    hits = [each.low <= 0 <= each.high for each in found if each and each.low is not None and each.high is not None]
    assert len(hits) == rounds
    assert np.mean(hits) > 0.93
