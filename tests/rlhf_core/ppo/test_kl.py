"""`kl.py`: each estimator against its definition and against the exact divergence; controllers by hand."""

import json
import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.ppo.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLKind,
    estimate_kl,
)

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)
properties = settings(max_examples=60, derandomize=True)
logprob = st.floats(-6, 0)


@st.composite
def distributions(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    """Two sets of logits over the same two to six tokens."""
    size = draw(st.integers(2, 6))
    logits = st.lists(st.floats(-4, 4), min_size=size, max_size=size)
    return draw(logits), draw(logits)


def probabilities(logits: list[float]) -> list[float]:
    weights = [math.exp(x) for x in logits]
    return [w / sum(weights) for w in weights]


def exact_kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@properties
@given(st.lists(st.tuples(logprob, logprob), min_size=1, max_size=8))
def test_each_estimate_is_its_definition_token_by_token(pairs: list[tuple[float, float]]) -> None:
    policy, reference = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
    k1, k2, k3 = (estimate_kl(policy, reference, kind) for kind in ("k1", "k2", "k3"))
    for t, (a, b) in enumerate(pairs):
        assert k1[t].item() == pytest.approx(a - b, abs=1e-12)
        assert k2[t].item() == pytest.approx((a - b) ** 2 / 2, abs=1e-12)
        assert k3[t].item() == pytest.approx(math.exp(b - a) - 1 - (b - a), abs=1e-10)
    assert (k3 >= 0).all()


@properties
@given(distributions())
def test_k1_and_k3_are_unbiased_under_the_policy_and_full_is_exact(
    logits: tuple[list[float], list[float]],
) -> None:
    p, q = probabilities(logits[0]), probabilities(logits[1])
    weights = torch.tensor(p, dtype=torch.float64)
    logprobs, ref_logprobs = weights.log(), torch.tensor(q, dtype=torch.float64).log()
    for kind in ("k1", "k3"):
        expectation = (weights * estimate_kl(logprobs, ref_logprobs, kind)).sum().item()
        assert expectation == pytest.approx(exact_kl(p, q), abs=1e-9)
    policy, reference = torch.tensor(logits, dtype=torch.float64).unbind()
    assert estimate_kl(policy, reference, "full").item() == pytest.approx(exact_kl(p, q), abs=1e-9)


def test_the_estimates_are_of_the_policy_to_its_reference_and_not_the_other_way() -> None:
    p, q = [0.9, 0.1], [0.5, 0.5]
    logits, ref_logits = torch.tensor(p).log(), torch.tensor(q).log()
    assert estimate_kl(logits, ref_logits, "full").item() == pytest.approx(exact_kl(p, q), abs=1e-6)
    assert abs(exact_kl(p, q) - exact_kl(q, p)) > 0.1
    assert estimate_kl(logits, ref_logits, "k1").tolist() == pytest.approx([math.log(1.8), math.log(0.2)])
    assert estimate_kl(logits, ref_logits, "k3").tolist() == pytest.approx(
        [1 / 1.8 - 1 + math.log(1.8), 5 - 1 + math.log(0.2)]
    )


def test_failure_06_equal_policies_have_no_kl_and_small_ones_keep_their_digits_in_float32() -> None:
    logprobs = torch.tensor([-3.0, -0.5])
    for kind in ("k1", "k2", "k3"):
        assert estimate_kl(logprobs, logprobs, kind).tolist() == [0, 0]
    assert estimate_kl(torch.tensor([0.0]), torch.tensor([1e-4]), "k3").item() == pytest.approx(5e-9, rel=1e-2)
    logits = torch.randn(3, 4)
    assert estimate_kl(logits, logits + 2.0, "full").tolist() == pytest.approx([0, 0, 0], abs=1e-6)


def test_full_drops_the_vocabulary_and_is_float32_from_bfloat16_logits() -> None:
    logits, ref_logits = torch.randn(2, 3, 50).bfloat16(), torch.randn(2, 3, 50).bfloat16()
    kl = estimate_kl(logits, ref_logits, "full")
    assert kl.shape == (2, 3)
    assert kl.dtype == torch.float32
    assert torch.allclose(kl.double(), estimate_kl(logits.double(), ref_logits.double(), "full"), atol=1e-5)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown estimate of the KL divergence: 'k4'"):
        estimate_kl(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", get_args(KLKind))
@pytest.mark.parametrize("garbage", GARBAGE)
def test_rule_18_garbage_on_padding_reaches_no_estimate_and_no_gradient(kind: KLKind, garbage: float) -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    shape = (2, 3, 4) if kind == "full" else (2, 3)
    outcomes: list[list[Tensor]] = []
    for filling in (0.0, garbage):
        generator = torch.Generator().manual_seed(1)
        pair = [torch.randn(shape, generator=generator) for _ in range(2)]
        for x in pair:
            x[~mask] = filling
            x.requires_grad_()
        kl = estimate_kl(pair[0], pair[1], kind, mask)
        gradients = torch.autograd.grad(kl.sum(), pair)
        assert kl[~mask].eq(0).all()
        assert all(g[~mask].eq(0).all() for g in gradients)
        outcomes.append([kl, *gradients])
    for clean, dirty in zip(*outcomes, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("kind", get_args(KLKind))
def test_gradients_of_every_estimate_are_right(kind: KLKind) -> None:
    """With and without padding; `full` is of all log-probabilities."""
    shape, real = ((2, 3, 4), (2, 3)) if kind == "full" else ((2, 3), (2, 3))
    generator = torch.Generator().manual_seed(2)
    pair = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for mask in (None, torch.tensor([[1, 1, 0], [1, 0, 0]])):
        assert estimate_kl(*pair, kind, mask).shape == real
        assert torch.autograd.gradcheck(lambda a, b, mask=mask: estimate_kl(a, b, kind, mask), pair)


@pytest.mark.parametrize(
    ("kl", "error"),
    [
        (6.0, 0.0),  # at the target
        (6.6, 0.1),
        (5.4, -0.1),
        (60.0, 0.2),  # clipped
        (0.0, -0.2),  # clipped
        (-3.0, -0.2),  # k1 may be negative
    ],
)
def test_rule_17_the_adaptive_controller_follows_ziegler(kl: float, error: float) -> None:
    controller = AdaptiveKLController(coef=0.2, target=6.0, horizon=10_000)
    controller.update(kl, batch_size=500)
    assert controller.coef == pytest.approx(0.2 * (1 + error * 500 / 10_000), rel=1e-12)


def test_rule_17_updates_compound() -> None:
    controller = AdaptiveKLController(coef=0.1, target=2.0, horizon=100)
    for kl in (4.0, 4.0, 1.0):
        controller.update(kl, batch_size=50)
    assert controller.coef == pytest.approx(0.1 * 1.1 * 1.1 * 0.9)


@properties
@given(st.lists(st.floats(-100, 100), max_size=50), st.integers(1, 64), st.integers(0, 1000), st.floats(0.01, 50))
def test_rule_17_the_coefficient_stays_positive(kls: list[float], batch_size: int, more: int, target: float) -> None:
    controller = AdaptiveKLController(0.05, target, horizon=batch_size + more)
    for kl in kls:
        before = controller.coef
        controller.update(kl, batch_size)
        assert controller.coef > 0
        assert abs(controller.coef / before - 1) <= 0.2 + 1e-12


def test_rule_17_a_batch_beyond_the_horizon_is_refused() -> None:
    controller = AdaptiveKLController(0.1, 6.0, horizon=100)
    with pytest.raises(ValueError, match="above the controller's horizon of 100 sequences"):
        controller.update(6.6, batch_size=101)
    assert controller.coef == 0.1


@pytest.mark.parametrize("kl", [float("nan"), float("inf")])
def test_rule_17_a_kl_that_is_not_finite_never_becomes_a_coefficient(kl: float) -> None:
    controller = AdaptiveKLController(0.1, 6.0, horizon=100)
    with pytest.raises(ValueError, match="measured KL"):
        controller.update(kl, batch_size=1)
    assert controller.coef == 0.1


def test_the_fixed_controller_never_moves() -> None:
    controller = FixedKLController(0.05)
    controller.update(1000.0, batch_size=10**9)
    assert controller.coef == 0.05


def test_failure_01_rule_19_a_controller_resumes_to_the_last_bit() -> None:
    kls = [3.0, 9.0, 0.1, 7.7, 6.2, 30.0]
    whole = AdaptiveKLController(0.1, 6.0, horizon=1000)
    for kl in kls:
        whole.update(kl, 128)
    first = AdaptiveKLController(0.1, 6.0, horizon=1000)
    for kl in kls[:3]:
        first.update(kl, 128)
    resumed = AdaptiveKLController(0.1, 6.0, horizon=1000)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for kl in kls[3:]:
        resumed.update(kl, 128)
    assert resumed.coef == whole.coef
    fixed = FixedKLController(0.3)
    fixed.load_state_dict(FixedKLController(0.4).state_dict())
    assert fixed.coef == 0.4
