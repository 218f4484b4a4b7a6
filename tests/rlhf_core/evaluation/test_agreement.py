"""`agreement.py` by hand."""

import numpy as np
import pytest

from rlhf_core.data.scorer import correlation
from rlhf_core.evaluation.agreement import agreement_at_margins, pair_agreement


def test_agreement_by_hand() -> None:
    """First prompt: of three pairs one alike, one turned round, one tied for the second scorer. Second: one alike."""
    found = pair_agreement([[1.0, 2.0, 3.0], [0.0, 5.0]], [[2.0, 3.0, 2.0], [-1.0, 1.0]], 500, 1)
    assert found is not None
    assert found.pairs == 4
    assert found.share == pytest.approx((1 + 0.5 + 0 + 1) / 4)
    assert found.interval == pytest.approx([0.5, 1.0])


def test_a_pair_that_both_see_as_equal_has_no_order_to_agree_on() -> None:
    found = pair_agreement([[1.0, 1.0 + 1e-12, 2.0]], [[4.0, 4.0, 3.0]], 100, 1)
    assert found is not None
    assert (found.share, found.pairs) == (0.0, 2)
    assert pair_agreement([[1.0, 1.0]], [[4.0, 4.0]], 100, 1) is None
    assert pair_agreement([[1.0], []], [[4.0], []], 100, 1) is None


def test_scorers_of_nothing_in_common_agree_in_half() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 400, 4)).tolist()
    found = pair_agreement(a, b, 500, 1)
    assert found is not None
    assert found.share == pytest.approx(0.5, abs=0.04)
    assert found.low < 0.5 < found.high
    same = pair_agreement(a, a, 500, 1)
    assert same is not None
    assert (same.share, same.low, same.high, same.pairs) == (1.0, 1.0, 1.0, 2400)


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt 0"):
        pair_agreement([[1.0, 2.0]], [[1.0]], 100, 1)
    with pytest.raises(ValueError, match="zip"):
        pair_agreement([[1.0, 2.0]], [], 100, 1)


def test_correlation_by_hand() -> None:
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    assert correlation([1, 2, 3], [1, 0, -1]) == pytest.approx(-1.0)
    assert correlation([0, 0, 1, 1], [0, 1, 0, 1]) == pytest.approx(0.0)


@pytest.mark.parametrize("constant", [0.1, 1.0, -3.3])
def test_correlation_with_something_that_does_not_vary_is_none(constant: float) -> None:
    """0.1 three times has a mean of 0.10000000000000002 in floating point, and so a deviation that is not 0."""
    assert correlation([constant] * 3, [1.0, 2.0, 3.0]) is None
    assert correlation([1.0, 2.0, 3.0], [constant] * 3) is None
    assert correlation([1.0], [2.0]) is None


def test_agreement_at_the_margins_of_others_by_hand() -> None:
    """Margins of 1 are ordered wrongly, of 2 rightly; the other answers have as many of each, or of the first only."""
    first, second = [[0.0, -1.0], [0.0, 5.0], [0.0, 5.0]], [[0.0, 1.0], [0.0, 2.0], [0.0, 2.0]]
    assert agreement_at_margins(first, second, [[0.0, 9.0], [0.0, 9.0]], [[0.0, 1.0], [0.0, 2.0]]) == 0.5
    assert agreement_at_margins(first, second, [[0.0, 9.0]], [[0.0, 1.0]]) == 0.0


def test_the_last_bits_of_a_sum_put_no_pair_into_another_bucket() -> None:
    """0.1 + 0.2 is a margin of 0.3, and no wider than the widest of the others."""
    assert agreement_at_margins([[0.0, 1.0]], [[-0.1, 0.2]], [[0.0, 1.0]], [[0.0, 0.3]]) == 1.0
    assert agreement_at_margins([[0.0, 1.0]], [[0.0, 0.1 + 0.2]], [[0.0, 1.0]], [[0.0, 0.3]]) == 1.0


def test_at_their_own_margins_it_is_the_plain_agreement() -> None:
    gold = np.random.default_rng(0).normal(size=(200, 3))
    proxy = gold + np.random.default_rng(1).normal(size=(200, 3))
    plain = pair_agreement(proxy.tolist(), gold.tolist(), 10, 1)
    assert plain is not None
    matched = agreement_at_margins(proxy.tolist(), gold.tolist(), proxy.tolist(), gold.tolist())
    assert matched == pytest.approx(plain.share)


def test_narrow_margins_alone_explain_a_fall() -> None:
    """The same noise on answers that lie half as far apart: less agreement, and the same at equal margins."""
    rng = np.random.default_rng(0)
    gold, noise = rng.normal(0, 2, (800, 3)), rng.normal(0, 1, (2, 800, 3))
    wide, narrow = ((gold + noise[0]).tolist(), gold.tolist()), ((gold / 2 + noise[1]).tolist(), (gold / 2).tolist())
    rates = [pair_agreement(*each, 10, 1) for each in (wide, narrow)]
    assert None not in rates
    far, near = (rate.share for rate in rates if rate is not None)
    assert far - near > 0.07
    assert agreement_at_margins(*wide, *narrow) == pytest.approx(near, abs=0.025)


def test_at_other_margins_ties_are_a_bucket_of_their_own() -> None:
    """Where gold ties, a half is all there is; two ties at once are no pair."""
    first, second = [[0.0, 1.0, 2.0], [0.0, 1.0, 1.0]], [[3.0, 3.0, 4.0], [3.0, 3.0, 3.0]]
    assert agreement_at_margins(first, second, [[0.0, 1.0]], [[3.0, 3.0]]) == 0.5
    assert agreement_at_margins(first, second, [[1.0, 1.0]], [[3.0, 3.0]]) is None


def test_margins_that_are_not_there_leave_it_unknown() -> None:
    assert agreement_at_margins([[0.0, 5.0]], [[0.0, 5.0]], [[0.0, 1.0]], [[0.0, 1.0]]) is None
