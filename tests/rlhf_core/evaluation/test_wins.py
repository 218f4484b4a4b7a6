"""`wins.py`: wins and ties by hand, and the length-controlled win rate on data whose answer is known."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray

from rlhf_core.evaluation.wins import (
    RIDGE,
    fit_logistic,
    length_controlled_win_rate,
    wins,
)


def test_wins_count_the_second_and_half_a_tie() -> None:
    assert wins([1.0, 2.0, 3.0, 1.0], [2.0, 1.0, 3.0, 1.0 + 1e-12]) == [1.0, 0.0, 0.5, 0.5]
    with pytest.raises(ValueError, match="zip"):
        wins([1.0], [1.0, 2.0])


def simulated(quality: float, length: float, longer: float, prompts: int = 4000) -> tuple[ndarray, ndarray]:
    """Wins with log-odds quality + length·tanh(Δ/sd), where Δ is N(longer, 20²)."""
    generator = np.random.default_rng(12)
    extra = generator.normal(longer, 20.0, prompts)
    odds = quality + length * np.tanh(extra / extra.std())
    return (generator.random(prompts) < 1 / (1 + np.exp(-odds))).astype(float), extra


def test_a_preference_for_length_alone_is_worth_nothing() -> None:
    won, extra = simulated(quality=0.0, length=2.0, longer=15.0)
    found = length_controlled_win_rate(won, extra, 500, 1)
    assert won.mean() > 0.65
    assert found.mean == pytest.approx(0.5, abs=0.025)
    assert found.low < 0.5 < found.high


def test_a_preference_for_quality_alone_stays() -> None:
    won, extra = simulated(quality=0.8, length=0.0, longer=15.0)
    found = length_controlled_win_rate(won, extra, 500, 1)
    assert found.mean == pytest.approx(1 / (1 + math.exp(-0.8)), abs=0.025)
    assert found.mean == pytest.approx(won.mean(), abs=0.02)


def test_quality_of_shorter_answers_is_corrected_upwards() -> None:
    won, extra = simulated(quality=0.8, length=2.0, longer=-15.0)
    assert won.mean() < 0.52
    assert length_controlled_win_rate(won, extra, 100, 1).mean == pytest.approx(0.69, abs=0.03)


def test_the_controlled_interval_covers_the_truth() -> None:
    generator, held = np.random.default_rng(4), 0
    truth = 1 / (1 + math.exp(-0.4))
    for trial in range(200):
        extra = generator.normal(10.0, 20.0, 300)
        odds = 0.4 + 1.5 * np.tanh(extra / extra.std())
        won = (generator.random(300) < 1 / (1 + np.exp(-odds))).astype(float)
        found = length_controlled_win_rate(won, extra, 200, trial)
        held += found.low <= truth <= found.high
    assert 0.90 <= held / 200 <= 0.99


def test_equal_lengths_control_nothing() -> None:
    won = [1.0] * 60 + [0.5] * 10 + [0.0] * 30
    found = length_controlled_win_rate(won, [3] * 100, 300, 1)
    assert found.mean == pytest.approx(0.65, abs=1e-3)
    assert found.low < 0.65 < found.high


def test_answers_of_a_prompt_are_resampled_together() -> None:
    """Each prompt's verdict three times over: the interval is that of the prompts, not of three times as many."""
    won, extra = simulated(0.3, 1.0, 5.0, prompts=200)
    once = length_controlled_win_rate(won, extra, 300, 1)
    thrice = length_controlled_win_rate(np.repeat(won[:, None], 3, 1), np.repeat(extra[:, None], 3, 1), 300, 1)
    assert [thrice.mean, *thrice.interval] == pytest.approx([once.mean, *once.interval], abs=1e-3)


def test_separation_does_not_blow_up() -> None:
    extra = np.linspace(-50, 50, 300)
    assert length_controlled_win_rate(np.ones(300), extra, 100, 1).mean == pytest.approx(0.9997, abs=2e-4)
    by_length = length_controlled_win_rate((extra > 0).astype(float), extra, 100, 1)
    assert by_length.mean == pytest.approx(0.5, abs=0.01)
    assert 0.0 < by_length.low <= by_length.high < 1.0
    assert length_controlled_win_rate([1.0], [7], 100, 1).mean > 0.9


def test_weights_are_answers_counted_as_often() -> None:
    """A weight of 2 is the answer twice, one of 0 is no answer, and only their proportions matter."""
    won, extra = (column[:200] for column in simulated(quality=0.5, length=1.0, longer=5.0))
    wins_, lengths = np.stack([won, 1 - won], axis=1), np.stack([extra, extra], axis=1)
    first = np.tile([1.0, 0.0], (200, 1))
    alone = length_controlled_win_rate(won, extra, 100, 1)
    weighted = length_controlled_win_rate(wins_, lengths, 100, 1, weights=first / 2)
    assert weighted.mean == pytest.approx(alone.mean, abs=1e-3), "the ridge is all that differs"
    assert weighted.interval == pytest.approx(alone.interval, abs=2e-3)
    assert weighted == length_controlled_win_rate(wins_, lengths, 100, 1, weights=7 * first)
    even = length_controlled_win_rate(wins_, lengths, 100, 1, weights=np.ones((200, 2)))
    assert even == length_controlled_win_rate(wins_, lengths, 100, 1)
    with pytest.raises(ValueError, match="the shape of the wins"):
        length_controlled_win_rate(won, extra, 100, 1, weights=first)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-1, 1), st.integers(0, 4)), min_size=1, max_size=30)
)
@settings(max_examples=200)
def test_the_fit_is_the_maximum_of_the_penalised_likelihood(rows: list[tuple[float, float, int]]) -> None:
    """Its gradient is zero there, whatever the data, and the function is strictly concave."""
    y, x, weight = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    (intercept, slope), *_ = fit_logistic(weight[None], x, y, np.zeros((1, 2)))
    missing = weight * (y - 1 / (1 + np.exp(-(intercept + slope * x))))
    assert missing.sum() == pytest.approx(RIDGE * intercept, abs=1e-6)
    assert (missing * x).sum() == pytest.approx(RIDGE * slope, abs=1e-6)


def test_many_fits_at_once_are_those_one_by_one() -> None:
    generator = np.random.default_rng(2)
    x, y = generator.uniform(-1, 1, 50), generator.integers(0, 2, 50).astype(float)
    weights = generator.integers(0, 3, (7, 50)).astype(float)
    together = fit_logistic(weights, x, y, np.zeros((1, 2)))
    alone = [fit_logistic(row[None], x, y, np.array([[3.0, -3.0]]))[0] for row in weights]
    assert together == pytest.approx(np.array(alone), abs=1e-7)


def test_what_has_no_controlled_win_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        length_controlled_win_rate([1.0, 0.0], [1.0], 10, 1)
    with pytest.raises(ValueError, match="not empty"):
        length_controlled_win_rate([], [], 10, 1)
    with pytest.raises(ValueError, match="finite"):
        length_controlled_win_rate([1.0, math.nan], [1.0, 2.0], 10, 1)
