"""`intervals.py`: coverage of the intervals, pairing, and what is resampled."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy import ndarray

from rlhf_core.determinism import stream
from rlhf_core.evaluation import intervals
from rlhf_core.evaluation.intervals import (
    bootstrap_interval,
    clustered_interval,
    estimate,
    estimate_difference,
    estimate_ratio,
    resampled,
)

DRAWS = 1000
RESAMPLES = 1000


def coverage(draw: Callable[[np.random.Generator], ndarray], truth: float) -> float:
    """The share of 1,000 simulated evaluations whose 95% interval holds the truth."""
    generator = np.random.default_rng(20260)
    held = 0
    for trial in range(DRAWS):
        low, high = bootstrap_interval(draw(generator), RESAMPLES, trial)
        held += low <= truth <= high
    return held / DRAWS


def verdicts(prompts: int, ties: float) -> Callable[[np.random.Generator], ndarray]:
    """A judge of true win rate 0.6: wins (1), ties (½, with this probability) and losses."""
    return lambda generator: generator.choice([1.0, 0.5, 0.0], prompts, p=[0.6 - ties / 2, ties, 0.4 - ties / 2])


@pytest.mark.slow
@pytest.mark.chosen("400-0.2")
@pytest.mark.parametrize(("prompts", "ties"), [(300, 0.0), (400, 0.2)])
def test_the_interval_of_a_win_rate_covers_the_truth_in_95_of_100_draws(prompts: int, ties: float) -> None:
    assert 0.93 <= coverage(verdicts(prompts, ties), 0.6) <= 0.97


def test_the_interval_of_a_paired_difference_covers_the_truth_in_95_of_100_draws() -> None:
    """Two models whose scores share most of their variance, the prompt's; the second is 0.3 better."""
    generator, held, widths = np.random.default_rng(7), 0, []
    for trial in range(DRAWS):
        prompt = 2.0 * generator.normal(size=300)
        first = prompt + generator.normal(size=300)
        found = estimate_difference(first, prompt + 0.3 + generator.normal(size=300), RESAMPLES, trial)
        held += found.low <= 0.3 <= found.high
        widths.append(found.high - found.low)
    assert 0.93 <= held / DRAWS <= 0.97
    assert np.mean(widths) == pytest.approx(2 * 1.96 * math.sqrt(2 / 300), rel=0.02)


def test_the_interval_of_several_answers_a_prompt_covers_the_truth() -> None:
    """Three answers a prompt that agree with each other: three times the answers are not three times the prompts."""
    generator, held = np.random.default_rng(3), 0
    for trial in range(400):
        rate = generator.beta(3, 2, size=100)  # a mean of 0.6
        found = estimate((generator.random((100, 3)) < rate[:, None]).astype(float), 500, trial)
        held += found.low <= 0.6 <= found.high
    assert 0.92 <= held / 400 <= 0.975


def test_the_bootstrap_interval_is_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(1).normal(size=400).tolist()
    low, high = bootstrap_interval(values, 2000, 1)
    error = 1.96 * np.std(values) / 20
    assert low == pytest.approx(np.mean(values) - error, abs=0.015)
    assert high == pytest.approx(np.mean(values) + error, abs=0.015)


def test_the_bootstrap_is_a_function_of_its_seed() -> None:
    values = [0.0, 1.0, 1.0, 0.5, 0.0]
    assert bootstrap_interval(values, 50, 1) == bootstrap_interval(values, 50, 1)
    assert bootstrap_interval([3.0] * 4, 50, 1) == (3.0, 3.0)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_interval([], 50, 1)


def test_drawn_in_pieces_the_resamples_are_those_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = stream(5)
    one_by_one = [generator.integers(0, 37, 37) for _ in range(50)]
    for chunk in (1, 100, 2**20):
        monkeypatch.setattr("rlhf_core.evaluation.intervals.CHUNK", chunk)
        assert np.array_equal(np.concatenate(list(resampled(37, 50, 5))), one_by_one)


def test_an_estimate_by_hand() -> None:
    found = estimate([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], 500, 1)
    assert found.mean == pytest.approx(0.5)
    assert found.spread == pytest.approx(math.sqrt(2) / 6)  # of the seeds' means 2/3 and 1/3
    assert found.interval == list(bootstrap_interval([0.5, 1.0, 0.0], 500, 1))
    assert estimate([1.0, 2.0], 100, 1).spread is None


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), st.integers(0, 5))
def test_an_interval_holds_the_mean_and_moves_with_the_values(values: list[float], seed: int) -> None:
    found = estimate(values, 200, seed)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    moved = estimate([2.0 * value + 1.0 for value in values], 200, seed)
    assert [moved.low, moved.high] == pytest.approx([2 * found.low + 1, 2 * found.high + 1], abs=1e-6)


def test_a_paired_difference_by_hand() -> None:
    first, second = [1.0, 5.0, 9.0], [2.0, 6.0, 10.0]
    found = estimate_difference(first, second, 200, 1)
    assert (found.mean, found.low, found.high) == (1.0, 1.0, 1.0)
    back = estimate_difference(second, first, 200, 1)
    assert back.mean == -1.0
    tables = estimate_difference([[0.0, 1.0], [2.0, 3.0]], [[1.0, 1.0], [3.0, 3.0]], 200, 1)
    assert (tables.mean, tables.spread) == (0.5, pytest.approx(math.sqrt(0.5)))
    uneven = estimate_difference([0.0, 2.0], [[1.0, 1.0], [3.0, 5.0]], 200, 1)
    assert (uneven.mean, uneven.spread) == (1.5, None)


def test_prompts_with_more_values_count_more_and_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all prompts have equally many values it is the interval of their means; a lone prompt has no width."""
    values, owners = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [4, 4, 7, 7, 2, 2]
    assert clustered_interval(values, owners, 300, 1) == pytest.approx(bootstrap_interval([0.0, 0.5, 1.0], 300, 1))
    assert clustered_interval([1.0, 0.0, 1.0, 1.0], [9] * 4, 100, 1) == (0.75, 0.75)
    assert clustered_interval([1.0] * 9 + [0.0], [0] * 9 + [1], 500, 1) == (0.0, 1.0)
    values, owners = [1.0] * 9 + [0.0], [0] * 9 + [1]
    both = [0, 1]  # each prompt drawn once: nine of ten values, not one of two prompts
    with monkeypatch.context() as patch:
        patch.setattr(intervals, "resampled", lambda *_: iter([np.array([both])]))
        assert clustered_interval(values, owners, 1, 1) == pytest.approx((0.9, 0.9))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate([], 10, 1), "at least one"),
        (lambda: estimate([1.0, math.nan], 10, 1), "finite"),
        (lambda: estimate(np.zeros((2, 2, 2)), 10, 1), "shape"),
        (lambda: bootstrap_interval(np.zeros((2, 2)), 10, 1), "use `estimate`"),
        (lambda: estimate_difference([1.0], [1.0, 2.0], 10, 1), "same prompts"),
        (lambda: clustered_interval([1.0, 2.0], [1], 10, 1), "as many prompts"),
    ],
)
def test_what_has_no_interval_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_ratio_weighs_prompts_by_what_they_bring() -> None:
    """A loss in nats over tokens: the long answer counts for its tokens, and is resampled whole."""
    found = estimate_ratio([10.0, 1.0, 1.0], [20.0, 1.0, 1.0], 2000, 1)
    assert found.mean == pytest.approx(12 / 22)
    assert found.low == pytest.approx(0.5), "resamples of the long answer alone"
    assert found.high == pytest.approx(1.0), "and of the short ones alone"
    same = estimate_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], 500, 1)
    assert (same.mean, same.low, same.high, same.spread) == (2.0, 2.0, 2.0, None)
    with pytest.raises(ValueError, match="as many denominators"):
        estimate_ratio([1.0], [1.0, 2.0], 100, 1)
