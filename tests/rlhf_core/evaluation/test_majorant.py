"""The concave majorant: its vertices, and its height between and beyond them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.evaluation.majorant import line_of, majorant_at, neighbours, read_line, vertices

POINT = st.tuples(st.integers(0, 12), st.integers(-6, 6))


def best_mixture(target: float, points: list[tuple[float, float]]) -> float:
    """The highest mean score of two points whose mean KL is at most `target`."""
    heights = [score for kl, score in points if kl <= target]
    for low, a in points:
        for high, b in points:
            if low <= target < high:
                heights.append(a + (target - low) / (high - low) * (b - a))
    return max(heights)


@given(st.lists(POINT, min_size=1, max_size=9), st.floats(0, 12))
def test_its_height_is_that_of_the_best_mixture_of_two_points(points: list[tuple[int, int]], target: float) -> None:
    points = [(0, 0), *points]
    kl, score = [float(x) for x, _ in points], [float(y) for _, y in points]
    found = majorant_at(target, kl, score)
    if target > max(kl):
        assert found is None
    else:
        assert found == pytest.approx(best_mixture(target, [*zip(kl, score, strict=True)]))


@given(st.lists(POINT, min_size=1, max_size=9))
def test_it_rises_and_bends_down(points: list[tuple[int, int]]) -> None:
    kl, score = [float(x) for x, _ in points], [float(y) for _, y in points]
    line = line_of(kl, score)
    slopes = np.diff([score[i] for i in line]) / np.diff([kl[i] for i in line])
    assert (slopes > 0).all()
    assert (np.diff(slopes) < 0).all()
    assert score[line[-1]] == max(score)


def test_by_hand() -> None:
    """A point below the line, one above it, and a falling end."""
    kl, score = [0.0, 4.0, 1.0, 9.0, 2.0], [0.0, 4.0, 3.0, 3.5, 3.1]
    assert line_of(kl, score) == [0, 2, 1]
    assert majorant_at(2.5, kl, score) == pytest.approx(3.5), "half way between (1, 3) and (4, 4)"
    assert majorant_at(0.5, kl, score) == 1.5, "straight in KL, not in √KL"
    assert neighbours(2.5, kl, score) == (2, 1)
    assert neighbours(1.0, kl, score) == (2, 2)
    assert (majorant_at(6.0, kl, score), neighbours(6.0, kl, score)) == (4.0, (1, 1)), "less KL may always be used"
    assert (majorant_at(9.1, kl, score), neighbours(9.1, kl, score)) == (None, None)
    assert majorant_at(-0.1, kl, score) is None
    assert majorant_at(1.0, [], []) is None


def test_of_equal_points_the_first_is_a_vertex() -> None:
    assert line_of([0.0, 1.0, 1.0, 1.0], [0.0, 2.0, 2.0, 1.0]) == [0, 1]
    assert line_of([0.0, 0.0], [1.0, 2.0]) == [1]


def test_a_line_is_read_row_by_row_in_the_order_of_its_own_kl() -> None:
    kl, score = np.array([[0.0, 2.0, 1.0], [0.0, 1.0, 2.0]]), np.array([[0.0, 2.0, 3.0], [1.0, 9.0, 2.0]])
    chosen = np.array([[True, True, True], [True, False, True]])
    assert read_line(np.array([1.5, 1.0]), kl, score, chosen).tolist() == [2.5, 1.5]
    assert read_line(np.array([7.0, -1.0]), kl, score, chosen).tolist() == [2.0, 1.0]
    assert np.isnan(read_line(np.array([1.0, 1.0]), kl, score, np.zeros((2, 3), bool))).all()


def test_rows_do_not_influence_each_other() -> None:
    rng = np.random.default_rng(0)
    kl, score = rng.integers(0, 5, (50, 6)).astype(float), rng.integers(0, 5, (50, 6)).astype(float)
    together = vertices(kl, score)
    assert (together == np.stack([vertices(a, b) for a, b in zip(kl, score, strict=True)])).all()


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="a score for each KL"):
        majorant_at(1.0, [1.0], [])
