"""PPO's lead at equal KL, and whether its interval covers it."""

import numpy as np
import pytest

from rlhf_core.evaluation.frontier import lead_at_equal_kl

PROMPTS = 300


def flat(*values: float) -> np.ndarray:
    """A row a value, the same for all prompts."""
    return np.tile(np.array(values, dtype=np.float64)[:, None], PROMPTS)


def test_by_hand_where_prompts_do_not_differ() -> None:
    """The curve rises by 2 for every unit of √KL: 3 at 2.25 nats, where the other model has 2.5."""
    found = lead_at_equal_kl(flat(0, 1, 4), flat(0, 2, 4), flat(2.25)[0], flat(2.5)[0], 100, 1)
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_beyond_the_snapshots_there_is_no_lead() -> None:
    assert lead_at_equal_kl(flat(0, 1, 4), flat(0, 2, 4), flat(4.1)[0], flat(2.5)[0], 100, 1) is None


def test_what_makes_a_prompt_easy_for_both_drops_out() -> None:
    ease = np.random.default_rng(0).normal(0, 5, PROMPTS)
    found = lead_at_equal_kl(flat(0, 1, 4), flat(0, 2, 4) + ease, flat(2.25)[0], 2.5 + ease, 100, 1)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))


def test_an_interval_contains_the_uncertainty_of_both_kls() -> None:
    """Scores without noise: all doubt is about where on the curve the model lies, or where the snapshots do."""
    noise = np.random.default_rng(0).normal(0, 3, (3, PROMPTS))
    noise -= noise.mean(axis=1, keepdims=True)
    theirs = lead_at_equal_kl(flat(0, 1, 4), flat(0, 2, 4), 2.25 + noise[2], flat(2.5)[0], 500, 1)
    ours = flat(0, 1, 4)
    ours[1:] += noise[:2]
    curves = lead_at_equal_kl(ours, flat(0, 2, 4), flat(2.25)[0], flat(2.5)[0], 500, 1)
    for found in (theirs, curves):
        assert found is not None
        assert found.mean == pytest.approx(0.5)
        assert found.high - found.low > 0.1


@pytest.mark.slow
def test_of_200_intervals_about_95_in_100_cover_the_lead() -> None:
    """Snapshots and model with noise in KL and score that they share in part, as answers to one prompt do."""
    rng, covered = np.random.default_rng(1), 0
    kls, scores = np.array([0.0, 1.0, 2.25, 4.0]), np.array([0.0, 1.0, 1.5, 2.0])
    for _ in range(200):
        ease = rng.normal(0, 1, PROMPTS)
        curve_kl = kls[:, None] + rng.normal(0, 2, (4, PROMPTS)) * (kls > 0)[:, None]
        curve = scores[:, None] + ease + rng.normal(0, 1, (4, PROMPTS))
        kl = 1.5 + rng.normal(0, 2, PROMPTS)
        found = lead_at_equal_kl(curve_kl, curve, kl, 0.7 + ease + rng.normal(0, 1, PROMPTS), 300, 1)
        assert found is not None
        covered += found.low <= np.sqrt(1.5) - 0.7 <= found.high
    assert 184 <= covered <= 199
