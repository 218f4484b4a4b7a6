"""`best_of_n.py`: the estimator against brute-force enumeration, and the KL bound against exact cases."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.evaluation.best_of_n import best_of_n_kl, best_of_n_weights


def enumerated(rewards: list[float], n: int) -> list[float]:
    """How often each sample is the first best of all choices of n samples."""
    counts = [0] * len(rewards)
    for places in combinations(range(len(rewards)), n):
        counts[max(places, key=lambda i: (rewards[i], -i))] += 1
    return [count / math.comb(len(rewards), n) for count in counts]


@given(st.lists(st.sampled_from([-1.5, 0.0, 0.25, 3.0]), min_size=1, max_size=7), st.data())
def test_the_weights_are_those_of_all_choices_of_n_samples(rewards: list[float], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(rewards)))
    weights = best_of_n_weights(rewards, n)
    assert weights.tolist() == pytest.approx(enumerated(rewards, n))
    assert weights.sum() == pytest.approx(1.0)


def test_the_weights_by_hand() -> None:
    assert best_of_n_weights([0.3, 0.1, 0.2], 1).tolist() == pytest.approx([1 / 3] * 3)
    assert best_of_n_weights([0.3, 0.1, 0.2], 2).tolist() == pytest.approx([2 / 3, 0.0, 1 / 3])
    assert best_of_n_weights([0.3, 0.1, 0.2], 3).tolist() == [1.0, 0.0, 0.0]
    assert best_of_n_weights([1.0, 1.0], 2).tolist() == [1.0, 0.0]  # the earlier of two equals


def test_rows_are_prompts() -> None:
    rewards = np.random.default_rng(0).normal(size=(5, 8))
    together = best_of_n_weights(rewards, 3)
    assert np.array_equal(together, [best_of_n_weights(row, 3) for row in rewards])
    assert (best_of_n_weights(rewards, 8) * rewards).sum(axis=1) == pytest.approx(rewards.max(axis=1))
    assert (best_of_n_weights(rewards, 1) * rewards).sum(axis=1) == pytest.approx(rewards.mean(axis=1))


def test_the_estimator_is_unbiased_and_steadier_than_the_first_n() -> None:
    """Gold goes along with reward by 0.6; the best of 4 normal rewards has a mean of 1.02938."""
    generator = np.random.default_rng(1)
    rewards = generator.normal(size=(20_000, 16))
    gold = 0.6 * rewards + 0.8 * generator.normal(size=rewards.shape)
    ours = (best_of_n_weights(rewards, 4) * gold).sum(axis=1)
    first = np.take_along_axis(gold, rewards[:, :4].argmax(axis=1)[:, None], axis=1)[:, 0]
    assert ours.mean() == pytest.approx(0.6 * 1.02938, abs=0.01)
    assert ours.std() < 0.6 * first.std()


@pytest.mark.parametrize(("rewards", "n"), [([1.0, 2.0], 3), ([1.0], 0), ([], 1), (3.0, 1)])
def test_more_than_there_are_is_refused(rewards: object, n: int) -> None:
    with pytest.raises(ValueError, match="needs at least"):
        best_of_n_weights(rewards, n)  # type: ignore[arg-type]


def test_the_kl_by_hand() -> None:
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(4) == pytest.approx(math.log(4) - 0.75)
    with pytest.raises(ValueError, match="at least 1"):
        best_of_n_kl(0)


@pytest.mark.parametrize("n", [2, 4, 16])
def test_the_kl_is_a_bound_that_many_different_answers_reach(n: int) -> None:
    """k equally likely answers in order of reward: best-of-n takes the j-th with (j/k)^n − ((j−1)/k)^n."""

    def exact(k: int) -> float:
        edges = (np.arange(k + 1) / k) ** n
        p = np.diff(edges)
        p = p[p > 0]
        return float((p * np.log(p * k)).sum())

    assert exact(2) < exact(20) < best_of_n_kl(n)
    assert exact(100_000) == pytest.approx(best_of_n_kl(n), abs=1e-3)
