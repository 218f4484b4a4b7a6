"""`baselines.py`: the bag of words finds the minimum of its loss, and ranks have means for ties."""

import numpy as np
import pytest

from rlhf_core.evaluation.baselines import L2, TOLERANCE, BagOfWords, Differences, logistic_regression, ranks, words_of

TEXTS = ["good food, good day", "bad food", "good day", "bad bad day", "a day", "Good bad food"]
PAIRS = [(0, 1), (2, 3), (4, 3), (5, 1), (0, 5), (2, 1), (3, 4)]


def dense(texts: list[str], pairs: list[tuple[int, int]], words: list[str]) -> np.ndarray:
    counts = np.array([[words_of(text).count(word) for word in words] for text in texts], dtype=float)
    return np.array([counts[better] - counts[worse] for better, worse in pairs])


def test_the_bag_of_words_is_at_the_minimum_of_its_loss() -> None:
    found = BagOfWords.fitted(TEXTS, PAIRS)
    words = list(found.weights)
    assert words == ["bad", "day", "food", "good"], "words of a single text are left out"
    x, w = dense(TEXTS, PAIRS, words), np.array(list(found.weights.values()))
    gradient = L2 * w - x.T @ (1 / (1 + np.exp(x @ w)))
    assert np.abs(gradient).max() <= TOLERANCE
    assert found.weights["good"] > 0 > found.weights["bad"]
    assert found(["GOOD unseen", "bad good", ""]) == pytest.approx([w[3], w[0] + w[3], 0.0])


def test_products_are_those_of_the_matrix() -> None:
    generator = np.random.default_rng(1)
    texts, words, counts = generator.integers(0, 7, 40), generator.integers(0, 5, 40), generator.normal(size=40)
    matrix = np.zeros((7, 5))
    np.add.at(matrix, (texts, words), counts)
    better, worse = generator.integers(0, 7, (2, 30))
    differences = Differences(texts, words, counts, (7, 5), better, worse)
    full = matrix[better] - matrix[worse]
    assert differences.times(np.arange(5.0)) == pytest.approx(full @ np.arange(5.0))
    assert differences.transposed_times(np.arange(30.0)) == pytest.approx(full.T @ np.arange(30.0))


def test_separable_pairs_have_finite_weights() -> None:
    """Without the penalty the weights would grow for ever."""
    found = BagOfWords.fitted(["yes"] * 50 + ["no"] * 50, [(i, 50 + i) for i in range(50)])
    assert 0 < found.weights["yes"] == pytest.approx(-found.weights["no"], abs=1e-3)
    assert found.weights["yes"] < 5


def test_no_common_word_gives_equal_scores() -> None:
    assert BagOfWords.fitted(["one", "two"], [(0, 1)])(["one", "two"]).tolist() == [0.0, 0.0]
    empty = np.zeros(0, dtype=np.int64)
    assert logistic_regression(Differences(empty, empty, np.zeros(0), (2, 0), empty, empty)).shape == (0,)


def test_ranks_of_equal_values_are_their_mean() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [3.5, 1.0, 3.5, 2.0]
