"""`rewards.py`: token rewards against a slow loop over rows, and by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.ppo.rewards import normalise_scores, penalise_missing_eos, shape_rewards

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)
properties = settings(max_examples=60, derandomize=True)


@st.composite
def batches(draw: st.DrawFn, time: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B], KL [B, T] and a right-padded mask [B, T], float64."""
    lengths = draw(st.lists(st.integers(1, time), min_size=1, max_size=4))
    scores = draw(st.lists(st.floats(-10, 10), min_size=len(lengths), max_size=len(lengths)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    kl = torch.randn(len(lengths), time, generator=generator, dtype=torch.float64)
    mask = torch.arange(time) < torch.tensor(lengths).unsqueeze(1)
    return torch.tensor(scores, dtype=torch.float64), kl, mask


@properties
@given(batches(), st.floats(0, 2))
def test_rule_08_rewards_equal_a_slow_loop(batch: tuple[Tensor, Tensor, Tensor], kl_coef: float) -> None:
    scores, kl, mask = batch
    rewards = shape_rewards(scores, kl, mask, kl_coef)
    for row, length in enumerate(mask.sum(1).tolist()):
        expected = [-kl_coef * x for x in kl[row, :length].tolist()]
        expected[-1] += scores[row].item()
        assert rewards[row, :length].tolist() == pytest.approx(expected, abs=1e-12)
        assert rewards[row, length:].eq(0).all()


@properties
@given(batches(), st.floats(0, 2))
def test_rule_08_the_rewards_of_a_row_sum_to_the_score_minus_beta_times_its_kl(
    batch: tuple[Tensor, Tensor, Tensor], kl_coef: float
) -> None:
    scores, kl, mask = batch
    expected = scores - kl_coef * (kl * mask).sum(1)
    assert torch.allclose(shape_rewards(scores, kl, mask, kl_coef).sum(1), expected, atol=1e-10)


def test_failure_03_the_score_is_on_the_last_real_token_and_never_on_padding() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0]])
    rewards = shape_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(4, 4), mask, 0.1)
    assert rewards.tolist() == [[0, 1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 3], [0, 0, 4, 0]]


def test_rule_08_rewards_by_hand() -> None:
    scores, kl, mask = torch.tensor([2.0]), torch.tensor([[1.0, -0.5, 4.0, 9.0]]), torch.tensor([[1, 1, 1, 0]])
    assert shape_rewards(scores, kl, mask, 0.5)[0].tolist() == [-0.5, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_rule_18_garbage_on_padding_changes_no_reward(garbage: float) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    scores = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    kl = torch.full((3, 3), 0.5).masked_fill(mask == 0, garbage).requires_grad_()
    rewards = shape_rewards(scores, kl, mask, 0.1)
    assert rewards.sum(1).tolist() == pytest.approx([0.9, 1.85, 0.0])
    assert rewards[mask == 0].eq(0).all()
    rewards.sum().backward()
    assert kl.grad is not None
    assert kl.grad[mask == 0].eq(0).all()
    assert kl.grad[mask == 1].tolist() == pytest.approx([-0.1] * 5)
    assert scores.grad is not None
    assert scores.grad.tolist() == [1, 1, 0]


def test_a_score_that_is_not_a_number_stays_in_its_row_and_at_its_token() -> None:
    rewards = shape_rewards(torch.tensor([math.nan, 1.0]), torch.zeros(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]]), 0.1)
    assert rewards[0].isnan().tolist() == [False, True, False]
    assert rewards[1].tolist() == [0, 0, 1]


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="must be equal"):
        shape_rewards(torch.zeros(2), torch.zeros(2, 3), torch.ones(1, 3), 0.1)


def test_rule_04_a_response_that_did_not_end_is_penalised_and_no_other() -> None:
    scores = torch.tensor([1.0, 1.0, -2.0])
    assert penalise_missing_eos(scores, torch.tensor([True, False, False]), 1.5).tolist() == [1.0, -0.5, -3.5]
    assert penalise_missing_eos(scores, torch.tensor([1, 0, 1]), 0.5).tolist() == [1.0, 0.5, -2.0]
    assert scores.tolist() == [1.0, 1.0, -2.0]


@properties
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8), st.floats(-5, 5), st.floats(0.01, 5), st.floats(0.1, 9))
def test_rule_12_scores_are_normalised_and_then_clipped(
    scores: list[float], mean: float, std: float, clip: float
) -> None:
    expected = [min(max((s - mean) / std, -clip), clip) for s in scores]
    normal = normalise_scores(torch.tensor(scores, dtype=torch.float64), mean, std, clip)
    assert normal.tolist() == pytest.approx(expected, abs=1e-12)


def test_rule_12_order_normalise_then_clip_then_penalise() -> None:
    scores = normalise_scores(torch.tensor([14.0, -20.0, 5.0]), mean=4.0, std=2.0, clip=3.0)
    assert scores.tolist() == [3.0, -3.0, 0.5]
    assert penalise_missing_eos(scores, torch.tensor([False, False, True]), 1.0).tolist() == [2.0, -4.0, 0.5]


def test_rule_12_without_a_clip_nothing_is_clipped_and_a_constant_reward_model_is_only_centred() -> None:
    scores = torch.tensor([104.0, 2.0])
    assert normalise_scores(scores, mean=2.0, std=2.0, clip=None).tolist() == [51.0, 0.0]
    assert normalise_scores(scores, mean=2.0, std=0.0, clip=5.0).tolist() == [5.0, 0.0]


@pytest.mark.parametrize(
    ("mean", "std", "clip"),
    [
        (0.0, -1.0, 5.0),
        (0.0, math.nan, 5.0),
        (math.nan, 1.0, 5.0),
        (0.0, math.inf, 5.0),
        (0.0, 1.0, 0.0),
        (0.0, 1.0, -1.0),
    ],
)
def test_rule_12_impossible_statistics_are_refused(mean: float, std: float, clip: float) -> None:
    with pytest.raises(ValueError, match="scores"):
        normalise_scores(torch.zeros(2), mean, std, clip)
