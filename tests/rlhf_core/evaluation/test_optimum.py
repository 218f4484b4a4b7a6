"""The ceiling: the estimate against the optimum of a problem that is small enough to enumerate."""

import numpy as np
import pytest

from rlhf_core.evaluation.optimum import LEAST_EFFECTIVE, Draws, ceiling, log_importance, optimum, share_of_optimum

WORDS, LENGTH, PROMPTS = 4, 3, 60


class World:
    """Tabular policies over all sequences of three tokens, for each of 60 prompts; a proposal near the optimum."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        answers = WORDS**LENGTH
        self.rng = rng
        self.scores = rng.normal(0, 1, (PROMPTS, answers))
        self.ref = self.sequences(rng.normal(0, 1, (PROMPTS, LENGTH, WORDS)))
        tilted = np.log(self.ref) + self.scores / 0.7 + rng.normal(0, 0.5, (PROMPTS, answers))
        self.policy = np.exp(tilted) / np.exp(tilted).sum(axis=1, keepdims=True)

    @staticmethod
    def sequences(logits: np.ndarray) -> np.ndarray:
        """Probabilities of all sequences of independent tokens; [prompts, WORDS ** LENGTH]."""
        first, second, third = np.moveaxis(np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True), 1, 0)
        return np.einsum("pa,pb,pc->pabc", first, second, third).reshape(len(logits), -1)

    def exact(self, beta: float) -> tuple[float, float]:
        """KL and mean score of the optimum, added up over all sequences."""
        weights = self.ref * np.exp(self.scores / beta)
        best = weights / weights.sum(axis=1, keepdims=True)
        kl = (best * np.log(best / self.ref)).sum(axis=1).mean()
        return float(kl), float((best * self.scores).sum(axis=1).mean())

    def draws(self, counts: tuple[int, int]) -> Draws:
        """Samples of reference and policy for every prompt."""
        taken = [
            [np.concatenate([self.rng.choice(len(p), n, p=p) for p, n in zip((ref, policy), counts, strict=True)])]
            for ref, policy in zip(self.ref, self.policy, strict=True)
        ]
        places = np.concatenate(taken)
        pick = lambda table: np.take_along_axis(table, places, axis=1)  # noqa: E731
        ratios = np.stack([np.zeros(places.shape), np.log(pick(self.policy) / pick(self.ref))], axis=-1)
        return Draws(pick(self.scores), ratios, counts)


@pytest.mark.parametrize("counts", [(4000, 0), (2000, 2000), (200, 3800)])
def test_it_is_the_optimum_of_an_enumerable_problem(counts: tuple[int, int]) -> None:
    world = World()
    draws = world.draws(counts)
    for beta in (3.0, 1.0, 0.6):
        found, (kl, score) = optimum(draws, beta), world.exact(beta)
        assert found.kl == pytest.approx(kl, abs=0.03)
        assert found.mean(draws.scores) == pytest.approx(score, abs=0.03)
        assert found.weights.sum(axis=1) == pytest.approx(np.ones(PROMPTS))


def test_samples_of_a_policy_near_the_optimum_make_it_reach_farther() -> None:
    """With 24 samples a prompt: the effective size is larger, and KL and score are nearer to the exact ones."""
    world, beta = World(1), 0.7
    kl, _ = world.exact(beta)
    plain, mixed = (optimum(world.draws(counts), beta) for counts in ((24, 0), (12, 12)))
    assert mixed.effective_samples > 1.5 * plain.effective_samples
    assert abs(mixed.kl - kl) < abs(plain.kl - kl)


def test_no_sample_weighs_more_than_the_references_share_allows() -> None:
    draws = World().draws((8, 8))
    assert log_importance(draws).max() <= np.log(2) + 1e-9
    assert log_importance(World().draws((8, 0))) == pytest.approx(0.0), "a plain estimate"


def test_the_ceiling_rises_and_ends_where_the_samples_end() -> None:
    points = ceiling(World().draws((24, 8)))
    assert [point.kl for point in points] == sorted(point.kl for point in points)
    assert min(point.effective_samples for point in points) >= LEAST_EFFECTIVE
    assert 0 < len(points) < len(ceiling(World().draws((2000, 2000))))
    assert ceiling(World().draws((2, 1))) == []


def test_the_share_by_hand() -> None:
    kls, gains = [1.0, 2.0], [1.0, 1.5]
    assert share_of_optimum(0.625, 1.5, kls, gains) == pytest.approx(0.5)
    assert share_of_optimum(0.25, 0.5, kls, gains) == pytest.approx(0.5), "SFT is a point of the ceiling"
    assert share_of_optimum(1.0, 2.1, kls, gains) is None
    assert share_of_optimum(0.0, 0.0, kls, gains) is None
    assert share_of_optimum(1.0, 1.0, [], []) is None
    assert share_of_optimum(0.25, 0.5, [-0.1, *kls], [0.2, *gains]) == pytest.approx(0.5), "a KL below 0 is noise"


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit together"):
        log_importance(Draws(np.zeros((2, 3)), np.zeros((2, 3, 2)), (1, 1)))
    with pytest.raises(ValueError, match="above 0"):
        optimum(Draws(np.zeros((1, 1)), np.zeros((1, 1, 1)), (1,)), 0.0)
