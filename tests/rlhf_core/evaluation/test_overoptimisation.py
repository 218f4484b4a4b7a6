"""`overoptimisation.py`: fits recover what made the points and say when they cannot."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.evaluation.overoptimisation import Fit, fit_best_of_n, fit_rl, rl_curve

KL = [0.0, 0.25, 1.0, 4.0, 9.0, 20.0]
COEFFICIENT = st.floats(-5, 5).filter(lambda value: abs(value) > 0.01)


@given(COEFFICIENT, COEFFICIENT)
def test_a_fit_recovers_the_coefficients_that_made_the_points(alpha: float, beta: float) -> None:
    rl = fit_rl(KL, [math.sqrt(k) * (alpha - beta * math.log(math.sqrt(k))) if k else 0.0 for k in KL])
    best = fit_best_of_n(KL, [math.sqrt(k) * (alpha - beta * math.sqrt(k)) for k in KL])
    for fit in (rl, best):
        assert fit is not None
        assert (fit.alpha, fit.beta) == pytest.approx((alpha, beta), abs=1e-8)
        assert fit.r2 == pytest.approx(1.0)
        assert fit.points == 5


def test_noise_lowers_r2_and_moves_the_coefficients_little() -> None:
    generator = np.random.default_rng(0)
    kl = np.linspace(0.1, 30, 60)
    gain = [rl_curve(Fit(2.0, 0.8, 1.0, 0), k) for k in kl] + generator.normal(0, 0.2, 60)
    fit = fit_rl(kl, gain)
    assert fit is not None
    assert (fit.alpha, fit.beta) == pytest.approx((2.0, 0.8), abs=0.15)
    assert 0.5 < fit.r2 < 0.99


def test_the_curve_by_hand() -> None:
    fit = Fit(alpha=3.0, beta=1.0, r2=1.0, points=9)
    assert rl_curve(fit, 4.0) == pytest.approx(2 * (3 - math.log(2)))
    assert rl_curve(fit, 0.0) == rl_curve(fit, -0.1) == 0.0


@pytest.mark.parametrize("fit", [fit_rl, fit_best_of_n])
@pytest.mark.parametrize(
    ("kl", "gain"),
    [
        ([], []),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ([0.0, -0.1, 1.0, 2.0, 3.0], [0.0, 0.1, 1.0, 2.0, 3.0]),
        ([1.0, 1.0, 1.0, 1.0, 2.0, 3.0], [1.0, 1.1, 0.9, 1.0, 2.0, 3.0]),
        ([1.0, 2.0, 3.0, 4.0], [0.7] * 4),
    ],
    ids=["nothing", "three points", "three with KL above 0", "three distances", "no variation"],
)
def test_no_fit_where_the_data_carry_none(fit: object, kl: list[float], gain: list[float]) -> None:
    assert fit(kl, gain) is None  # type: ignore[operator]


def test_a_form_that_fits_worse_than_the_mean_has_a_negative_r2() -> None:
    fit = fit_best_of_n([1.0, 1.1, 1.2, 1.3, 400.0], [5.0, 4.0, 5.0, 4.0, 4.5])
    assert fit is not None
    assert fit.r2 < 0


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="a gain for each KL"):
        fit_rl([1.0], [])
