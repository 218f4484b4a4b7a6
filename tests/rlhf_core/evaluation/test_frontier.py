"""PPO's lead at equal KL: cross-fitted, and whether its interval covers it."""

import numpy as np
import pytest

from rlhf_core.evaluation.frontier import lead_at_equal_kl
from rlhf_core.evaluation.majorant import majorant_at

PROMPTS = 300


def flat(*values: float) -> np.ndarray:
    """A row a value, the same for all prompts."""
    return np.tile(np.array(values, dtype=np.float64)[:, None], PROMPTS)


def test_by_hand_where_prompts_do_not_differ() -> None:
    """The majorant is straight from (1, 2) to (4, 4): 3 at 2.5 nats, where the other model has 2.5. The point at
    3 nats is below the line, and a curve joined in the order of KL would fall to it."""
    curve_kl, curve = flat(0, 1, 3, 4), flat(0, 2, 1, 4)
    found = lead_at_equal_kl(curve_kl, curve, flat(2.5)[0], flat(2.5)[0], 100, 1)
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_it_is_flat_from_the_best_point_to_the_largest_kl_and_ends_there() -> None:
    curve_kl, curve = flat(0, 1, 4), flat(0, 2, 1)
    found = lead_at_equal_kl(curve_kl, curve, flat(3.0)[0], flat(2.5)[0], 100, 1)
    assert found is not None
    assert found.mean == pytest.approx(-0.5)
    assert lead_at_equal_kl(curve_kl, curve, flat(4.1)[0], flat(2.5)[0], 100, 1) is None


def test_one_prompt_cannot_be_divided() -> None:
    one = np.ones((2, 1))
    assert lead_at_equal_kl(one * [[0], [2]], one, one[0], one[0], 100, 1) is None


def test_what_makes_a_prompt_easy_for_both_drops_out() -> None:
    ease = np.random.default_rng(0).normal(0, 5, PROMPTS)
    found = lead_at_equal_kl(flat(0, 1, 4), flat(0, 2, 4) + ease, flat(2.5)[0], 2.5 + ease, 100, 1)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))


def test_an_interval_contains_the_uncertainty_of_both_kls() -> None:
    """Scores without noise: all doubt is about where on the line the model lies, or where the points do."""
    noise = np.random.default_rng(0).normal(0, 3, (3, PROMPTS))
    noise -= noise.mean(axis=1, keepdims=True)
    theirs = lead_at_equal_kl(flat(0, 1, 4), flat(0, 2, 4), 2.5 + noise[2], flat(2.5)[0], 500, 1)
    ours = flat(0, 1, 4)
    ours[1:] += noise[:2]
    curves = lead_at_equal_kl(ours, flat(0, 2, 4), flat(2.5)[0], flat(2.5)[0], 500, 1)
    for found in (theirs, curves):
        assert found is not None
        assert found.mean == pytest.approx(0.5, abs=0.1)
        assert found.high - found.low > 0.1


def test_rule_25_the_best_of_many_equal_points_looks_no_better_than_it_is() -> None:
    """Ten points of one true score: the majorant of the same prompts takes the luckiest, the cross-fitted does not."""
    rng, fitted, naive = np.random.default_rng(2), [], []
    curve_kl = flat(0, *([2.0] * 10))
    for _ in range(40):
        curve = np.vstack([flat(0.0), 1.0 + rng.normal(0, 2, (10, PROMPTS))])
        found = lead_at_equal_kl(curve_kl, curve, flat(2.0)[0], flat(1.0)[0], 100, 1)
        assert found is not None
        fitted.append(found.mean)
        naive.append(majorant_at(2.0, curve_kl[:, 0].tolist(), curve.mean(axis=1).tolist()) - 1.0)  # type: ignore[operator]
    assert np.mean(naive) > 0.12
    assert abs(np.mean(fitted)) < 0.06


@pytest.mark.slow
def test_of_200_intervals_about_95_in_100_cover_the_lead() -> None:
    """Points and model with noise in KL and score that they share in part, as answers to one prompt do."""
    rng, covered = np.random.default_rng(1), 0
    kls, scores = np.array([0.0, 1.0, 2.25, 4.0]), np.array([0.0, 1.0, 1.5, 2.0])
    truth = majorant_at(1.5, kls.tolist(), scores.tolist())
    assert truth is not None
    for _ in range(200):
        ease = rng.normal(0, 1, PROMPTS)
        curve_kl = kls[:, None] + rng.normal(0, 2, (4, PROMPTS)) * (kls > 0)[:, None]
        curve = scores[:, None] + ease + rng.normal(0, 1, (4, PROMPTS))
        kl = 1.5 + rng.normal(0, 2, PROMPTS)
        found = lead_at_equal_kl(curve_kl, curve, kl, 0.7 + ease + rng.normal(0, 1, PROMPTS), 300, 1)
        assert found is not None
        covered += found.low <= truth - 0.7 <= found.high
    assert 180 <= covered <= 199
