"""`diversity.py` by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.evaluation.diversity import distinct_n, mean_overlap, overlap


def test_distinct_n_by_hand() -> None:
    texts = ["eat the oats", "Eat the egg", "oats"]
    assert distinct_n(texts, 1) == pytest.approx(4 / 7)
    assert distinct_n(texts, 2) == pytest.approx(3 / 4)
    assert distinct_n(texts, 4) == 0.0
    assert distinct_n([], 1) == 0.0


def test_overlap_by_hand() -> None:
    assert overlap(["eat the oats", "Eat the egg"]) == pytest.approx(1 / 3)  # "eat the" of three bigrams
    assert overlap(["a b c", "a b c", "x y"]) == pytest.approx(1 / 3)  # 1, 0 and 0
    assert overlap(["a b", "b a"]) == 0.0
    assert overlap(["alone"]) is None
    assert overlap([]) is None


def test_short_answers_are_compared_as_they_are() -> None:
    assert overlap(["yes", "Yes"]) == 1.0
    assert overlap(["yes", "no"]) == 0.0
    assert overlap(["", " "]) == 1.0
    assert overlap(["", "yes"]) == 0.0
    assert overlap(["yes", "yes please"]) == 0.0


def test_the_mean_is_over_prompts_with_two_answers() -> None:
    assert mean_overlap([["a b", "a b"], ["a b", "c d"], ["alone"]]) == 0.5
    assert mean_overlap([["alone"], []]) is None
    assert mean_overlap([]) is None


@given(st.lists(st.text(alphabet="ab ", max_size=8), min_size=2, max_size=5))
def test_overlap_is_between_0_and_1_and_ignores_order(answers: list[str]) -> None:
    value = overlap(answers)
    assert value is not None
    assert 0.0 <= value <= 1.0
    assert overlap(answers[::-1]) == pytest.approx(value)
    assert overlap([answers[0]] * 3) == 1.0
