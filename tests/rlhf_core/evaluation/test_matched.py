"""Agreement at the margins of other answers."""

import numpy as np
import pytest

from rlhf_core.evaluation.agreement import pair_agreement
from rlhf_core.evaluation.matched import agreement_at_margins


def test_by_hand() -> None:
    """Margins of 1 are ordered wrongly, of 2 rightly; the other answers have as many of each, or of the first only."""
    first, second = [[0.0, -1.0], [0.0, 5.0], [0.0, 5.0]], [[0.0, 1.0], [0.0, 2.0], [0.0, 2.0]]
    assert agreement_at_margins(first, second, [[0.0, 9.0], [0.0, 9.0]], [[0.0, 1.0], [0.0, 2.0]]) == 0.5
    assert agreement_at_margins(first, second, [[0.0, 9.0]], [[0.0, 1.0]]) == 0.0


def test_of_themselves_it_is_the_plain_agreement() -> None:
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


def test_ties_are_a_bucket_of_their_own() -> None:
    """Where gold ties, a half is all there is; two ties at once are no pair."""
    first, second = [[0.0, 1.0, 2.0], [0.0, 1.0, 1.0]], [[3.0, 3.0, 4.0], [3.0, 3.0, 3.0]]
    assert agreement_at_margins(first, second, [[0.0, 1.0]], [[3.0, 3.0]]) == 0.5
    assert agreement_at_margins(first, second, [[1.0, 1.0]], [[3.0, 3.0]]) is None


def test_margins_that_are_not_there_leave_it_unknown() -> None:
    assert agreement_at_margins([[0.0, 5.0]], [[0.0, 5.0]], [[0.0, 1.0]], [[0.0, 1.0]]) is None
