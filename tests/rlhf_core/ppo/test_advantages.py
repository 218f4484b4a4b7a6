"""`advantages.py` and the masked statistics under it, against a textbook's code and slow loops over rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.models.masked import masked_log_softmax, masked_mean, masked_sum, masked_var, zero_padding
from rlhf_core.ppo.advantages import GroupBaseline, compute_gae, compute_group_advantages, whiten

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)
properties = settings(max_examples=60, derandomize=True)


@st.composite
def batches(draw: st.DrawFn, rows: int = 4, time: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards [B, T], values [B, T+1] and a right-padded mask [B, T], float64."""
    lengths = draw(st.lists(st.integers(1, time), min_size=1, max_size=rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    rewards = torch.randn(len(lengths), time, generator=generator, dtype=torch.float64)
    values = torch.randn(len(lengths), time + 1, generator=generator, dtype=torch.float64)
    return rewards, values, torch.arange(time) < torch.tensor(lengths).unsqueeze(1)


rates = st.floats(0, 1)


def textbook_gae(rewards: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """As textbooks have it, for rows without padding."""
    T = rewards.shape[1]
    advantages = torch.zeros_like(rewards)
    last_gae: Tensor | float = 0.0
    for t in reversed(range(T)):
        delta = rewards[:, t] + gamma * values[:, t + 1] - values[:, t]
        last_gae = delta + gamma * lam * last_gae
        advantages[:, t] = last_gae
    returns = advantages + values[:, :T]
    return advantages, returns


def gae_by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = Σ_l (γλ)^l δ_{t+l} of one response without padding, after which V is 0."""
    after = [*values, 0.0][1:]
    deltas = [r + gamma * w - v for r, v, w in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, len(deltas))) for t in range(len(deltas))]


@properties
@given(batches(), rates, rates)
def test_without_a_mask_gae_is_exactly_the_textbooks(
    batch: tuple[Tensor, Tensor, Tensor], gamma: float, lam: float
) -> None:
    rewards, values, _ = batch
    for mine, theirs in zip(
        compute_gae(rewards, values, gamma, lam), textbook_gae(rewards, values, gamma, lam), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_gae_defaults_are_the_textbooks_and_one_row_may_stand_alone() -> None:
    rewards, values = torch.randn(2, 3, 5), torch.randn(2, 3, 6)
    assert torch.equal(compute_gae(rewards[0], values[0])[0], textbook_gae(rewards[0], values[0])[0])
    for result, row in zip(compute_gae(rewards[0, 0], values[0, 0]), compute_gae(rewards[0], values[0]), strict=True):
        assert torch.equal(result, row[0])


DELTAS = [0.04, 0.03, 0.06, 0.08, 0.02, 0.05, 0.91]
PRINTED = [0.81, 0.78, 0.75, 0.69, 0.61, 0.59, 0.55]
"""The rows δ_t and A_t of a tutorial's worked example."""


def test_rule_10_a_worked_example_follows_from_its_recursion_and_not_from_its_printed_row() -> None:
    """A_t = δ_t + 0.95·A_{t+1}: A_7 = 0.91, A_6 = 0.05 + 0.95·0.91 = 0.9145, … The row printed there ends in 0.55,
    where the recursion begins with δ_7 = 0.91; no number of it is right."""
    advantages, _ = compute_gae(torch.tensor([DELTAS], dtype=torch.float64), torch.zeros(1, 8, dtype=torch.float64))
    by_hand = [0.9151528, 0.9212135, 0.9381194, 0.9243363, 0.888775, 0.9145, 0.91]
    assert advantages[0].tolist() == pytest.approx(by_hand, abs=1e-7)
    later = [*by_hand[1:], 0.0]
    assert by_hand == pytest.approx([d + 0.95 * a for d, a in zip(DELTAS, later, strict=True)], abs=1e-7)
    assert min(abs(right - printed) for right, printed in zip(by_hand, PRINTED, strict=True)) > 0.1
    assert [d + 0.95 * a for d, a in zip(DELTAS, [*PRINTED[1:], 0.0], strict=True)] != pytest.approx(PRINTED, abs=0.01)


@properties
@given(batches(), rates, rates)
def test_rule_09_rule_10_gae_runs_over_real_tokens_and_v_is_0_after_the_last(
    batch: tuple[Tensor, Tensor, Tensor], gamma: float, lam: float
) -> None:
    rewards, values, mask = batch
    advantages, returns = compute_gae(rewards, values, gamma, lam, mask)
    for row, length in enumerate(mask.sum(1).tolist()):
        real_rewards, real_values = rewards[row, :length].tolist(), values[row, :length].tolist()
        expected = gae_by_definition(real_rewards, real_values, gamma, lam)
        assert advantages[row, :length].tolist() == pytest.approx(expected, abs=1e-10)
        sums = [a + v for a, v in zip(expected, real_values, strict=True)]
        assert returns[row, :length].tolist() == pytest.approx(sums, abs=1e-10)
        assert advantages[row, length:].eq(0).all()
        assert returns[row, length:].eq(0).all()


def test_rule_09_a_truncated_response_has_no_value_after_its_end() -> None:
    rewards, values = torch.zeros(1, 2), torch.tensor([[0.0, 0.0, 100.0]])
    full = torch.ones(1, 2)
    assert compute_gae(rewards, values, mask=full)[0].tolist() == [[0.0, 0.0]]
    assert compute_gae(rewards, values)[0][0, 1].item() == 100.0


def test_rule_10_with_lambda_1_the_returns_are_the_sums_of_the_rewards_to_come() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    _, returns = compute_gae(rewards, torch.randn(1, 5), lam=1.0, mask=torch.tensor([[1, 1, 1, 0]]))
    assert returns[0].tolist() == pytest.approx([7.0, 6.0, 4.0, 0.0], abs=1e-5)


@properties
@given(batches(), st.data())
def test_rule_10_a_row_with_gaps_is_the_row_of_its_real_tokens_alone(
    batch: tuple[Tensor, Tensor, Tensor], data: st.DataObject
) -> None:
    rewards, values, right_padded = batch
    size = rewards.numel()
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size))).view_as(right_padded)
    advantages, returns = compute_gae(rewards, values, 0.9, 0.8, mask)
    for row, keep in enumerate(mask):
        real = values[row, :-1][keep].tolist()
        expected = gae_by_definition(rewards[row][keep].tolist(), real, 0.9, 0.8)
        assert advantages[row][keep].tolist() == pytest.approx(expected, abs=1e-10)
        assert (returns[row][keep] - advantages[row][keep]).tolist() == pytest.approx(real, abs=1e-10)
    assert advantages[~mask].eq(0).all()
    assert returns[~mask].eq(0).all()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("garbage", GARBAGE)
def test_rule_10_garbage_on_padding_reaches_neither_advantages_nor_gradients(garbage: float) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    after = torch.cat([mask, torch.zeros(3, 1, dtype=mask.dtype)], dim=1).bool()
    clean: list[Tensor] = []
    dirty: list[Tensor] = []
    for filling, results in ((0.0, clean), (garbage, dirty)):
        generator = torch.Generator().manual_seed(0)
        rewards = torch.randn(3, 4, generator=generator).masked_fill(~mask.bool(), filling).requires_grad_()
        values = torch.randn(3, 5, generator=generator).masked_fill(~after, filling).requires_grad_()
        advantages, returns = compute_gae(rewards, values, mask=mask)
        with torch.autograd.detect_anomaly():  # no NaN on the way either
            (advantages.square().sum() + returns.square().sum()).backward()
        results.extend([advantages, returns, rewards.grad, values.grad])
    for mine, other in zip(dirty, clean, strict=True):
        assert torch.equal(mine, other)
    assert dirty[2][~mask.bool()].eq(0).all()
    assert dirty[3][~after].eq(0).all()


def test_gae_refuses_values_without_the_one_after_the_end() -> None:
    with pytest.raises(ValueError, match="4 rewards a row need 5 values"):
        compute_gae(torch.zeros(2, 4), torch.zeros(2, 4))


def test_gae_gradients_are_right() -> None:
    rewards = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    values = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    assert torch.autograd.gradcheck(lambda r, v: compute_gae(r, v, 0.9, 0.8, mask), (rewards, values))


@properties
@given(batches(), st.booleans())
def test_rule_11_whitening_uses_population_variance_over_real_tokens_only(
    batch: tuple[Tensor, Tensor, Tensor], shift_mean: bool
) -> None:
    x, _, mask = batch
    real = [v for row, keep in zip(x.tolist(), mask.tolist(), strict=True) for v, k in zip(row, keep, strict=True) if k]
    mean = sum(real) / len(real)
    variance = sum((v - mean) ** 2 for v in real) / len(real)
    back = 0.0 if shift_mean else mean
    expected = [(v - mean) / (variance + 1e-8) ** 0.5 + back for v in real]
    white = whiten(x, mask, shift_mean)
    assert white[mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert white[~mask].eq(0).all()


def test_rule_11_whitening_numbers_by_hand() -> None:
    x = torch.tensor([[1.0, 3.0, 999.0], [5.0, 7.0, -999.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    scale = 5**0.5  # mean 4; population variance (9 + 1 + 1 + 9) / 4 = 5, a sample's would be 20/3
    assert whiten(x, mask)[0].tolist() == pytest.approx([-3 / scale, -1 / scale, 0])
    assert whiten(x, mask, shift_mean=False)[1].tolist() == pytest.approx([4 + 1 / scale, 4 + 3 / scale, 0])


def test_whitening_without_a_mask_takes_any_shape_and_constants() -> None:
    for shape in ((6,), (2, 3), (1, 2, 3)):
        x = torch.arange(6.0, dtype=torch.float64).reshape(shape)
        assert torch.allclose(whiten(x), (x - x.mean()) / (x.var(correction=0) + 1e-8).sqrt())
    assert whiten(torch.full((3,), 2.0)).tolist() == [0, 0, 0]
    assert whiten(torch.full((3,), 2.0), shift_mean=False).tolist() == [2, 2, 2]
    assert whiten(torch.tensor([2.0])).tolist() == [0]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_failure_13_garbage_on_padding_leaks_into_no_statistic(garbage: float) -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    x = torch.tensor([[1.0, 2.0, garbage], [6.0, garbage, garbage]], requires_grad=True)
    assert masked_sum(x, mask).item() == 9
    assert masked_mean(x, mask).item() == 3
    assert masked_var(x, mask).item() == pytest.approx((4 + 1 + 9) / 3)
    assert zero_padding(x, mask).tolist() == [[1, 2, 0], [6, 0, 0]]
    (whiten(x, mask).pow(3).sum() + masked_var(x, mask) + masked_mean(x, mask)).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad[~mask].eq(0).all()
    assert x.grad[mask].ne(0).all()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_log_softmax_is_finite_on_padding_and_passes_no_gradient_there(garbage: float) -> None:
    mask = torch.tensor([1, 0])
    logits = torch.tensor([[1.0, 2.0, 3.0], [garbage, 0.0, garbage]], requires_grad=True)
    logprobs = masked_log_softmax(logits, mask, temperature=2.0)
    assert torch.equal(logprobs[0], torch.log_softmax(logits[0] / 2, dim=-1))
    assert logprobs[1].isfinite().all()
    logprobs.square().sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].ne(0).all()
    assert logits.grad[1].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_may_be_bool_integer_or_float(dtype: torch.dtype) -> None:
    x, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1, 1, 0]).to(dtype)
    assert masked_mean(x, mask).item() == 1.5
    assert compute_gae(x, torch.zeros(4), lam=1.0, mask=mask)[0].tolist() == [3, 2, 0]


def test_a_mask_without_a_real_token_gives_zeros_and_zero_gradients_not_nan() -> None:
    x, mask = torch.tensor([float("nan"), 1.0], requires_grad=True), torch.zeros(2)
    for value in (masked_sum(x, mask), masked_mean(x, mask), masked_var(x, mask), whiten(x, mask).sum()):
        assert value.item() == 0
        (gradient,) = torch.autograd.grad(value, x)
        assert gradient.tolist() == [0, 0]


def test_a_mask_of_another_shape_is_refused_because_it_would_miscount() -> None:
    with pytest.raises(ValueError, match="must be equal"):
        masked_mean(torch.zeros(2, 3), torch.ones(2, 1))


def loo_by_definition(returns: list[float], k: int) -> list[float]:
    """Each return minus the mean of the others of its group, one at a time."""
    found = []
    for i, own in enumerate(returns):
        start = i // k * k
        others = [g for j, g in enumerate(returns[start : start + k]) if start + j != i]
        found.append(own - sum(others) / len(others))
    return found


@given(st.integers(2, 5), st.integers(1, 4), st.data())
def test_rule_12_rloo_compares_with_the_other_answers_to_the_prompt(k: int, groups: int, data: st.DataObject) -> None:
    returns = data.draw(st.lists(st.floats(-9, 9), min_size=k * groups, max_size=k * groups))
    found = compute_group_advantages(torch.tensor(returns, dtype=torch.float64), "rloo", k)
    assert found.tolist() == pytest.approx(loo_by_definition(returns, k), abs=1e-9)


@given(st.integers(2, 5), st.integers(1, 4), st.data())
def test_rule_12_grpo_has_mean_0_and_deviation_1_in_each_group(k: int, groups: int, data: st.DataObject) -> None:
    returns = data.draw(st.lists(st.integers(-9, 9), min_size=k * groups, max_size=k * groups))
    found = compute_group_advantages(torch.tensor(returns, dtype=torch.float64), "grpo", k)
    for start in range(0, len(returns), k):
        own = returns[start : start + k]
        mean = sum(own) / k
        deviation = (sum((g - mean) ** 2 for g in own) / k + 1e-8) ** 0.5
        assert found[start : start + k].tolist() == pytest.approx([(g - mean) / deviation for g in own], abs=1e-6)


def test_rule_12_reinforce_has_the_baseline_of_the_batch() -> None:
    assert compute_group_advantages(torch.tensor([1.0, 2.0, 6.0]), "reinforce").tolist() == [-2.0, -1.0, 3.0]


@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_rule_12_answers_are_compared_two_at_least(kind: GroupBaseline) -> None:
    for k, n in ((1, 4), (3, 4)):
        with pytest.raises(ValueError, match="compares k"):
            compute_group_advantages(torch.zeros(n), kind, k)
    with pytest.raises(ValueError, match="unknown baseline"):
        compute_group_advantages(torch.zeros(4), "mean", 2)  # type: ignore[arg-type]


def test_dr_grpo_is_grpo_without_the_division() -> None:
    """Liu et al. 2025: G − μ of the prompt's answers, and not RLOO's k/(k − 1) times as much."""
    returns = torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 8.0])
    expected = torch.tensor([-2.0, -1.0, 3.0, -1.0, -1.0, 2.0])
    assert torch.allclose(compute_group_advantages(returns, "dr_grpo", 3), expected)
    assert torch.allclose(compute_group_advantages(returns, "rloo", 3), expected * 3 / 2)
