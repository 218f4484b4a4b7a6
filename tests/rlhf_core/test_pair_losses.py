"""`pair_losses.py`: each loss by hand, against a slow loop, at large margins, and its gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.pair_losses import bradley_terry_loss, dpo_loss, implicit_margin, ipo_loss, order_right

Four = tuple[float, float, float, float]
PAIRS = st.lists(st.tuples(*[st.floats(-60, 0)] * 4), min_size=1, max_size=6)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def columns(pairs: list[Four]) -> list[torch.Tensor]:
    return [tensor(*column) for column in zip(*pairs, strict=True)]


def test_bradley_terry_loss_by_hand() -> None:
    loss = bradley_terry_loss(tensor(1.0, 0.0), tensor(0.0, 2.0))
    assert loss.item() == pytest.approx((math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2))) / 2)
    assert bradley_terry_loss(tensor(3.0), tensor(3.0)).item() == pytest.approx(math.log(2))


@settings(max_examples=50, derandomize=True)
@given(st.lists(st.tuples(*[st.floats(-20, 20)] * 3), min_size=1, max_size=6), st.booleans())
def test_bradley_terry_loss_equals_a_slow_loop(pairs: list[tuple[float, float, float]], with_margin: bool) -> None:
    chosen, rejected, margin = (tensor(*column) for column in zip(*pairs, strict=True))
    slow = [math.log1p(math.exp(-(c - r - (m if with_margin else 0.0)))) for c, r, m in pairs]
    loss = bradley_terry_loss(chosen, rejected, margin if with_margin else None)
    assert loss.item() == pytest.approx(sum(slow) / len(slow), abs=1e-12)


def test_bradley_terry_margin_by_hand() -> None:
    loss = bradley_terry_loss(tensor(1.0), tensor(0.0), margin=tensor(0.4))
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.6)))


def test_bradley_terry_loss_survives_large_gaps() -> None:
    chosen = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.tensor([500.0, -500.0]))
    loss.backward()
    assert loss.item() == pytest.approx(500.0)
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [-0.5, 0.0]


def test_bradley_terry_gradient() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(bradley_terry_loss, inputs)


def test_dpo_loss_by_hand() -> None:
    """β 0.5; the policy likes the first chosen answer 2 nats more than the reference, the rejected one 1 nat less."""
    sides = tensor(-3.0, -8.0), tensor(-6.0, -4.0), tensor(-5.0, -8.0), tensor(-5.0, -4.0)
    assert implicit_margin(*sides, 0.5).tolist() == [1.5, 0.0]
    expected = (math.log(1 + math.exp(-1.5)) + math.log(2)) / 2
    assert dpo_loss(implicit_margin(*sides, 0.5)).item() == pytest.approx(expected)
    smoothed = (0.9 * math.log(1 + math.exp(-1.5)) + 0.1 * math.log(1 + math.exp(1.5)) + math.log(2)) / 2
    assert dpo_loss(implicit_margin(*sides, 0.5), label_smoothing=0.1).item() == pytest.approx(smoothed)


@settings(max_examples=50, derandomize=True)
@given(PAIRS, st.floats(0.01, 2), st.sampled_from([0.0, 0.1, 0.4]))
def test_dpo_loss_equals_a_slow_loop(pairs: list[Four], beta: float, smoothing: float) -> None:
    slow = 0.0
    for chosen, rejected, ref_chosen, ref_rejected in pairs:
        margin = beta * (chosen - ref_chosen) - beta * (rejected - ref_rejected)
        slow += (1 - smoothing) * math.log1p(math.exp(-margin)) + smoothing * math.log1p(math.exp(margin))
    margins = implicit_margin(*columns(pairs), beta)
    assert dpo_loss(margins, smoothing).item() == pytest.approx(slow / len(pairs), rel=1e-9, abs=1e-12)


@settings(max_examples=50, derandomize=True)
@given(PAIRS, st.floats(0.01, 2), st.sampled_from([0.0, 0.1]))
def test_the_gradient_raises_the_chosen_and_lowers_the_rejected(
    pairs: list[Four], beta: float, smoothing: float
) -> None:
    """−β·(σ(−m) − ε)/n for the chosen answer, the opposite for the rejected one (Rafailov et al. 2023, section 4)."""
    chosen, rejected, ref_chosen, ref_rejected = columns(pairs)
    chosen.requires_grad_(True)
    rejected.requires_grad_(True)
    dpo_loss(implicit_margin(chosen, rejected, ref_chosen, ref_rejected, beta), smoothing).backward()
    margin = implicit_margin(chosen, rejected, ref_chosen, ref_rejected, beta).detach()
    expected = -beta * (torch.sigmoid(-margin) - smoothing) / len(pairs)
    assert chosen.grad is not None
    assert rejected.grad is not None
    torch.testing.assert_close(chosen.grad, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(rejected.grad, -expected, rtol=1e-9, atol=1e-12)


def test_dpo_loss_survives_large_margins() -> None:
    chosen = tensor(-5000.0, -1.0).requires_grad_(True)
    loss = dpo_loss(implicit_margin(chosen, tensor(-1.0, -5000.0), tensor(-1.0, -1.0), tensor(-1.0, -1.0), 1.0))
    loss.backward()
    assert loss.item() == pytest.approx(4999 / 2)
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [-0.5, 0.0]


def test_ipo_loss_by_hand() -> None:
    """τ 0.25, so the target is 2 nats: a log-ratio margin of 3 nats is 1 above it, one of 0 is 2 below."""
    margin = implicit_margin(tensor(-3.0, -8.0), tensor(-6.0, -4.0), tensor(-5.0, -8.0), tensor(-5.0, -4.0), 0.25)
    assert ipo_loss(margin, 0.25).item() == pytest.approx((1.0 + 4.0) / 2)
    assert ipo_loss(tensor(0.0), 0.25).item() == pytest.approx(4.0), "1/(2τ)², where policy and reference are the same"


@settings(max_examples=50, derandomize=True)
@given(PAIRS, st.floats(0.01, 2))
def test_ipo_loss_equals_a_slow_loop(pairs: list[Four], tau: float) -> None:
    slow = [((c - rc) - (r - rr) - 1 / (2 * tau)) ** 2 for c, r, rc, rr in pairs]
    found = ipo_loss(implicit_margin(*columns(pairs), tau), tau)
    assert found.item() == pytest.approx(sum(slow) / len(slow), rel=1e-9)


def test_equal_scores_are_half_right() -> None:
    assert order_right(tensor(0.5, -2.0, 0.0)).tolist() == [1.0, 0.0, 0.5]
