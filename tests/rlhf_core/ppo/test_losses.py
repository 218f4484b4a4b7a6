"""`losses.py` against a textbook's code, against slow float64 loops, and by hand where the numbers are few."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_core.models.head import Predictions
from rlhf_core.models.token_logprobs import logprobs_and_entropy
from rlhf_core.ppo.losses import (
    compute_entropy,
    compute_kl_loss,
    compute_ppo_loss,
    compute_ppo_total_loss,
    compute_value_loss,
    importance_weights,
)
from rlhf_core.ppo.statistics import approx_kl, clip_fraction, explained_variance, ratio_max, value_clip_fraction

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)
VOCABULARY = 5
properties = settings(max_examples=50, derandomize=True)


class Batch:
    """A minibatch of float64 tensors [B, T] (logits [B, T, V]) with `garbage` on its right padding."""

    def __init__(self, lengths: list[int], seed: int, garbage: float = 0.0, time: int = 5) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.shape = (len(lengths), time)
        self.garbage = garbage
        self.mask = torch.arange(time) < torch.tensor(lengths).unsqueeze(1)
        self.logprobs, self.old_logprobs = self.draw(0.4), self.draw(0.4)
        self.advantages, self.values, self.returns, self.old_values = (self.draw(1.0) for _ in range(4))
        self.logits = self.draw(2.0, VOCABULARY)
        self.actions = torch.randint(VOCABULARY, self.shape, generator=self.generator)

    def draw(self, scale: float, *more: int) -> Tensor:
        x = scale * torch.randn(*self.shape, *more, generator=self.generator, dtype=torch.float64)
        x[~self.mask] = self.garbage
        return x.requires_grad_()

    def real(self, x: Tensor) -> list[float]:
        return x[self.mask].tolist()

    def old(self) -> tuple[Tensor, Tensor]:
        return self.old_logprobs.detach(), self.advantages.detach()

    def total(self) -> dict[str, Tensor]:
        return compute_ppo_total_loss(
            self.logprobs,
            self.old_logprobs,
            self.advantages,
            self.values,
            self.returns,
            self.logits,
            mask=self.mask,
            old_values=self.old_values,
        )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    return Batch(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)), draw(st.integers(0, 10_000)))


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


# The losses as textbooks have them, without padding.


def textbook_ppo_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_ratio: float = 0.2) -> Tensor:
    log_ratio = logprobs - old_logprobs
    ratio = torch.exp(log_ratio)
    unclipped = ratio * advantages
    clipped_ratio = torch.clamp(ratio, 1 - clip_ratio, 1 + clip_ratio)
    clipped = clipped_ratio * advantages
    return -torch.min(unclipped, clipped).mean()


def textbook_value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor | None = None,
    clip_value: bool = True,
    clip_ratio: float = 0.2,
) -> Tensor:
    if clip_value and old_values is not None:
        value_clipped = old_values + torch.clamp(values - old_values, -clip_ratio, clip_ratio)
        loss_unclipped = (values - returns) ** 2
        loss_clipped = (value_clipped - returns) ** 2
        return torch.max(loss_unclipped, loss_clipped).mean()
    return F.mse_loss(values, returns)


def textbook_entropy(logits: Tensor) -> Tensor:
    probs = F.softmax(logits, dim=-1)
    log_probs = F.log_softmax(logits, dim=-1)
    entropy = -(probs * log_probs).sum(dim=-1)
    return entropy.mean()


@pytest.mark.parametrize("shape", [(16,), (3, 4)])
def test_without_a_mask_every_loss_is_the_textbooks(shape: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    logprobs, old, advantages, values, returns = torch.randn(5, *shape).unbind()
    old_values, logits = values + 0.3 * torch.randn(shape), torch.randn(*shape, 50)
    assert torch.equal(compute_ppo_loss(logprobs, old, advantages), textbook_ppo_loss(logprobs, old, advantages))
    assert torch.equal(
        compute_ppo_loss(logprobs, old, advantages, 0.05), textbook_ppo_loss(logprobs, old, advantages, 0.05)
    )
    for options in ((), (None, False), (old_values,), (old_values, False), (old_values, True, 0.1)):
        assert torch.allclose(
            compute_value_loss(values, returns, *options), textbook_value_loss(values, returns, *options), rtol=1e-6
        )
    assert torch.allclose(compute_entropy(logits), textbook_entropy(logits), rtol=1e-6)
    losses = compute_ppo_total_loss(logprobs, old, advantages, values, returns, logits)
    policy, value = textbook_ppo_loss(logprobs, old, advantages), F.mse_loss(values, returns)
    entropy = textbook_entropy(logits)
    assert list(losses) == ["total_loss", "policy_loss", "value_loss", "entropy"]
    for mine, theirs in zip(
        losses.values(), (policy + 0.5 * value - 0.01 * entropy, policy, value, entropy), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-6)


@properties
@given(batches(), st.floats(0.05, 0.5))
def test_rule_15_policy_loss_is_the_mean_over_real_tokens(batch: Batch, clip_ratio: float) -> None:
    terms = []
    for new, old, advantage in zip(
        batch.real(batch.logprobs), batch.real(batch.old_logprobs), batch.real(batch.advantages), strict=True
    ):
        ratio = math.exp(new - old)
        terms.append(-min(ratio * advantage, max(1 - clip_ratio, min(ratio, 1 + clip_ratio)) * advantage))
    loss = compute_ppo_loss(batch.logprobs, batch.old_logprobs, batch.advantages, clip_ratio, batch.mask)
    assert loss.item() == pytest.approx(mean(terms), abs=1e-12)


@properties
@given(batches(), st.floats(0.05, 0.5), st.booleans())
def test_rule_15_value_loss_is_the_larger_square_over_real_tokens(batch: Batch, clip_ratio: float, clip: bool) -> None:
    terms = []
    for value, target, old in zip(
        batch.real(batch.values), batch.real(batch.returns), batch.real(batch.old_values), strict=True
    ):
        near = min(max(value, old - clip_ratio), old + clip_ratio) if clip else value
        terms.append(max((value - target) ** 2, (near - target) ** 2))
    loss = compute_value_loss(batch.values, batch.returns, batch.old_values, clip, clip_ratio, batch.mask)
    assert loss.item() == pytest.approx(mean(terms), abs=1e-12)


@properties
@given(batches())
def test_rule_18_entropy_is_the_mean_over_real_tokens(batch: Batch) -> None:
    terms = []
    for row in batch.logits[batch.mask].tolist():
        weights = [math.exp(x) for x in row]
        terms.append(-sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights))
    assert compute_entropy(batch.logits, batch.mask).item() == pytest.approx(mean(terms), abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "ratio", "moves"),
    [
        (1.0, 1.1, True),  # a good action, not yet pushed far
        (1.0, 1.3, False),  # a good action, pushed far enough
        (1.0, 0.5, True),  # a good action that has become less likely: corrected
        (-1.0, 0.9, True),  # a bad action, not yet pushed far
        (-1.0, 0.7, False),  # a bad action, pushed far enough
        (-1.0, 1.5, True),  # a bad action that has become more likely: corrected
    ],
)
def test_rule_15_the_clip_stops_the_gradient_only_in_the_direction_already_taken(
    advantage: float, ratio: float, moves: bool
) -> None:
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = compute_ppo_loss(logprob, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage]))
    loss.backward()
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(-ratio * advantage if moves else 0.0)
    clipped = 1.2 if advantage > 0 else 0.8
    assert loss.item() == pytest.approx(-(ratio if moves else clipped) * advantage)


def test_rule_15_at_the_first_update_the_loss_is_minus_the_advantage_and_still_has_a_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = compute_ppo_loss(logprobs, logprobs.detach(), torch.tensor([3.0, -1.0]))
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.5, 0.5])


def test_rule_15_value_loss_has_no_half_and_clips_pessimistically() -> None:
    values, returns, old = torch.tensor([2.0]), torch.tensor([5.0]), torch.tensor([1.0])
    assert compute_value_loss(values, returns).item() == 9.0
    assert compute_value_loss(values, returns, old, clip_ratio=0.5).item() == pytest.approx(3.5**2)
    assert compute_value_loss(values, returns, old, clip_value=False).item() == 9.0
    assert compute_value_loss(values, torch.tensor([0.0]), old, clip_ratio=0.5).item() == 4.0


def test_rule_16_the_value_clip_has_a_key_of_its_own() -> None:
    batch = Batch([5, 3], seed=1)
    arguments = (batch.logprobs, batch.old_logprobs, batch.advantages, batch.values, batch.returns, batch.logits)
    for clip_ratio in (0.01, 0.4):
        losses = compute_ppo_total_loss(
            *arguments, clip_ratio, mask=batch.mask, old_values=batch.old_values, value_clip_ratio=0.3
        )
        expected = compute_value_loss(batch.values, batch.returns, batch.old_values, clip_ratio=0.3, mask=batch.mask)
        assert torch.equal(losses["value_loss"], expected)


def test_rule_15_the_total_subtracts_entropy_and_weights_each_part() -> None:
    batch = Batch([5, 2], seed=2)
    arguments = (batch.logprobs, batch.old_logprobs, batch.advantages, batch.values, batch.returns)
    losses = compute_ppo_total_loss(*arguments, batch.logits, vf_coef=0.3, entropy_coef=0.7, mask=batch.mask)
    expected = losses["policy_loss"] + 0.3 * losses["value_loss"] - 0.7 * losses["entropy"]
    assert losses["total_loss"].item() == pytest.approx(expected.item())
    logprobs = batch.logits.log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    known = compute_ppo_total_loss(*arguments, None, vf_coef=0.3, entropy_coef=0.7, mask=batch.mask, entropy=entropy)
    assert known["total_loss"].item() == pytest.approx(losses["total_loss"].item())
    for logits, known_entropy in ((None, None), (batch.logits, entropy)):
        with pytest.raises(ValueError, match="one of the two"):
            compute_ppo_total_loss(*arguments, logits, entropy=known_entropy)


def test_entropy_of_the_uniform_distribution_is_log_v_and_of_a_certain_one_0() -> None:
    assert compute_entropy(torch.full((2, 3, 1000), 7.0)).item() == pytest.approx(math.log(1000))
    assert compute_entropy(torch.tensor([[1e4, 0.0, 0.0]])).item() == 0.0


def test_rule_13_sums_of_micro_batches_over_all_tokens_give_the_gradient_of_the_one_big_batch() -> None:
    whole, parts = (Batch([1, 5, 2, 4], seed=3) for _ in range(2))
    whole.total()["total_loss"].backward()
    tokens = parts.mask.sum()
    for rows in (slice(0, 1), slice(1, 4)):
        losses = compute_ppo_total_loss(
            parts.logprobs[rows],
            parts.old_logprobs[rows],
            parts.advantages[rows],
            parts.values[rows],
            parts.returns[rows],
            parts.logits[rows],
            mask=parts.mask[rows],
            old_values=parts.old_values[rows],
            reduction="sum",
        )
        (losses["total_loss"] / tokens).backward()
    for name in ("logprobs", "values", "logits"):
        big, small = getattr(whole, name).grad, getattr(parts, name).grad
        assert big.abs().sum() > 0
        assert (big - small).norm() <= 1e-12 * big.norm()


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown reduction: 'median'"):
        compute_ppo_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), reduction="median")  # type: ignore[arg-type]


def test_the_loss_of_each_token_adds_up_to_the_sum() -> None:
    batch = Batch([5, 2, 0], seed=3)
    pair = (batch.logprobs, batch.old_logprobs, batch.advantages)
    each, total = (compute_ppo_loss(*pair, 0.2, batch.mask, reduction=kind) for kind in ("none", "sum"))
    assert each.shape == batch.mask.shape
    assert each[~batch.mask].eq(0).all()
    assert torch.allclose(each.sum(), total)


def test_a_token_is_clipped_only_where_the_clip_takes_its_gradient() -> None:
    """ρ above 1 + ε with a positive advantage, or below 1 − ε with a negative one; the other two keep theirs."""
    new = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    compute_ppo_loss(new, torch.zeros(4), advantages, 0.2, reduction="sum").backward()
    assert new.grad is not None
    without_gradient = new.grad.eq(0).float().mean().item()
    assert clip_fraction(new, torch.zeros(4), advantages, 0.2).item() == without_gradient == 0.5


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("garbage", GARBAGE)
def test_rule_18_garbage_on_padding_changes_no_loss_and_no_gradient(garbage: float) -> None:
    clean, dirty = Batch([5, 2, 0], seed=5), Batch([5, 2, 0], seed=5, garbage=garbage)
    clean_losses, dirty_losses = clean.total(), dirty.total()
    for name, loss in clean_losses.items():
        assert torch.equal(dirty_losses[name], loss), name
    clean_losses["total_loss"].backward()
    with torch.autograd.detect_anomaly():  # no NaN on the way either
        dirty_losses["total_loss"].backward()
    for name in ("logprobs", "old_logprobs", "advantages", "values", "returns", "old_values", "logits"):
        gradient = getattr(dirty, name).grad
        assert torch.equal(gradient, getattr(clean, name).grad), name
        assert gradient[~dirty.mask].eq(0).all(), name


@pytest.mark.parametrize("garbage", GARBAGE)
def test_failure_13_garbage_on_padding_changes_no_diagnostic(garbage: float) -> None:
    clean, dirty = (diagnostics(Batch([5, 2, 1], seed=6, garbage=filling)) for filling in (0.0, garbage))
    assert dirty == clean
    assert all(math.isfinite(value) for value in dirty)


def diagnostics(batch: Batch) -> list[float]:
    pair = (batch.logprobs, batch.old_logprobs)
    return [
        clip_fraction(*pair, batch.advantages, 0.2, batch.mask).item(),
        value_clip_fraction(batch.values, batch.old_values, 0.2, batch.mask).item(),
        approx_kl(*pair, batch.mask).item(),
        ratio_max(*pair, batch.mask).item(),
        explained_variance(batch.values, batch.returns, batch.mask).item(),
        compute_entropy(batch.logits, batch.mask).item(),
    ]


@properties
@given(batches())
def test_rule_18_diagnostics_are_masked_means_over_real_tokens(batch: Batch) -> None:
    differences = [n - o for n, o in zip(batch.real(batch.logprobs), batch.real(batch.old_logprobs), strict=True)]
    moves = [abs(v - o) for v, o in zip(batch.real(batch.values), batch.real(batch.old_values), strict=True)]
    clipped, value_clipped, kl, largest, _, _ = diagnostics(batch)
    signs = [math.copysign(1.0, a) for a in batch.real(batch.advantages)]
    assert clipped == pytest.approx(
        mean([float(sign * (math.exp(d) - 1) > 0.2) for sign, d in zip(signs, differences, strict=True)])
    )
    assert value_clipped == pytest.approx(mean([float(move > 0.2) for move in moves]))
    assert kl == pytest.approx(mean([math.exp(d) - 1 - d for d in differences]), abs=1e-12)
    assert largest == pytest.approx(math.exp(max(differences)))


def test_rule_14_approx_kl_estimates_the_kl_of_the_old_policy_to_the_new_one() -> None:
    """Summed over all actions with the weight of the old policy it is the exact KL(π_old ‖ π_θ), not the other."""
    old, new = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    weighted = sum(p * approx_kl(n.log().view(1), p.log().view(1)) for p, n in zip(old, new, strict=True))
    assert float(weighted) == pytest.approx(float((old * (old / new).log()).sum()), rel=1e-5)
    assert float(weighted) != pytest.approx(float((new * (new / old).log()).sum()), rel=1e-2)


def test_approx_kl_of_almost_equal_policies_keeps_its_digits_and_its_sign_in_float32() -> None:
    logprobs = torch.full((4,), -3.0)
    assert approx_kl(logprobs, logprobs).item() == 0
    assert approx_kl(torch.tensor([1e-4]), torch.zeros(1)).item() == pytest.approx(5e-9, rel=1e-2)


@properties
@given(batches())
def test_explained_variance_is_over_real_tokens(batch: Batch) -> None:
    returns, values = batch.real(batch.returns), batch.real(batch.values)
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    total, left = (mean([(x - mean(xs)) ** 2 for x in xs]) for xs in (returns, errors))
    if total > 1e-6:
        expected = pytest.approx(1 - left / total, abs=1e-9)
        assert explained_variance(batch.values, batch.returns, batch.mask).item() == expected


def test_explained_variance_of_known_critics() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns).item() == 1
    assert explained_variance(returns + 5, returns).item() == 1
    assert explained_variance(torch.zeros(3), returns).item() == 0
    assert explained_variance(-returns, returns).item() == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(3)).item() == 0
    assert explained_variance(torch.zeros(3), torch.ones(3)).item() == 1


def test_diagnostics_carry_no_gradient() -> None:
    batch = Batch([3], seed=7)
    assert not clip_fraction(batch.logprobs, batch.old_logprobs, batch.advantages, 0.2, batch.mask).requires_grad
    assert not approx_kl(batch.logprobs, batch.old_logprobs, batch.mask).requires_grad
    assert not ratio_max(batch.logprobs, batch.old_logprobs, batch.mask).requires_grad
    assert not explained_variance(batch.values, batch.returns, batch.mask).requires_grad


def test_a_minibatch_of_padding_alone_gives_zeros_not_nan() -> None:
    batch = Batch([0, 0], seed=8, garbage=float("nan"))
    losses = batch.total()
    assert [loss.item() for loss in losses.values()] == [0, 0, 0, 0]
    losses["total_loss"].backward()
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.eq(0).all()
    assert diagnostics(batch)[:4] == [0, 0, 0, 0]


@properties
@given(batches(), st.floats(0.3, 2.0))
def test_rule_05_logprobs_and_entropy_follow_the_temperature(batch: Batch, temperature: float) -> None:
    logits, actions = batch.logits[batch.mask], batch.actions[batch.mask]
    logprobs, entropy = logprobs_and_entropy(Predictions(logits), actions, temperature)
    for place, row in enumerate(logits.tolist()):
        weights = [math.exp(x / temperature) for x in row]
        chosen = weights[int(actions[place])] / sum(weights)
        assert logprobs[place].item() == pytest.approx(math.log(chosen), abs=1e-10)
        expected = -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)
        assert entropy[place].item() == pytest.approx(expected, abs=1e-10)


def test_rule_05_logprobs_are_float32_even_from_bfloat16_logits() -> None:
    logits, actions = torch.randn(6, 100).bfloat16(), torch.randint(100, (6,))
    found = (logprobs_and_entropy(Predictions(table), actions, 0.7) for table in (logits, logits.double()))
    for mine, exact in zip(*found, strict=True):
        assert mine.dtype == torch.float32
        assert torch.allclose(mine.double(), exact, atol=1e-5)
    assert compute_entropy(logits).dtype == torch.float32


@pytest.mark.parametrize("garbage", GARBAGE)
def test_the_entropy_of_padding_may_have_any_logits(garbage: float) -> None:
    batch = Batch([4, 1], seed=9, garbage=garbage)
    compute_entropy(batch.logits, batch.mask).backward()
    assert batch.logits.grad is not None
    assert batch.logits.grad.isfinite().all()
    assert batch.logits.grad[~batch.mask].eq(0).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_0_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be above 0"):
        logprobs_and_entropy(Predictions(torch.zeros(1, 2)), torch.zeros(1, dtype=torch.int64), temperature)


LOSSES: dict[str, Callable[[Batch], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]] = {
    "policy": lambda b: (
        lambda *x: compute_ppo_loss(*x, mask=b.mask),
        (b.logprobs, b.old_logprobs, b.advantages),
    ),
    "value": lambda b: (
        lambda v, r, o: compute_value_loss(v, r, o, mask=b.mask),
        (b.values, b.returns, b.old_values),
    ),
    "value_unclipped": lambda b: (lambda v, r: compute_value_loss(v, r, mask=b.mask), (b.values, b.returns)),
    "entropy": lambda b: (lambda x: compute_entropy(x, b.mask), (b.logits,)),
    "logprobs": lambda b: (
        lambda x: torch.stack(logprobs_and_entropy(Predictions(x[b.mask]), b.actions[b.mask], 0.8)),
        (b.logits,),
    ),
    "sums": lambda b: (
        lambda *x: compute_ppo_loss(*x, mask=b.mask, dual_clip=1.2, weights=b.values.detach().exp(), reduction="sum"),
        (b.logprobs, b.old_logprobs, b.advantages),
    ),
    "dual_clip": lambda b: (lambda x: compute_ppo_loss(x, *b.old(), 0.2, b.mask, dual_clip=1.5), (b.logprobs,)),
    **{
        kind: lambda b, kind=kind: (
            lambda x: compute_kl_loss(x, b.old()[0], b.values.detach(), kind, b.mask),
            (b.logprobs,),
        )
        for kind in ("rho_k1", "rho_k3", "k2")
    },
    "total": lambda b: (
        lambda *x: compute_ppo_total_loss(*x, mask=b.mask, old_values=b.old_values.detach())["total_loss"],
        (b.logprobs, b.old_logprobs, b.advantages, b.values, b.returns, b.logits),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_every_loss_are_right(name: str) -> None:
    """Against differences of 1e-6; no ratio or value is that near to a kink of its clip."""
    batch = Batch([3, 1], seed=10, time=3)
    moved = (batch.logprobs - batch.old_logprobs).exp()[batch.mask], (batch.values - batch.old_values)[batch.mask]
    for positions, kinks in ((moved[0], (0.8, 1.2)), (moved[1], (-0.2, 0.2))):
        assert all((positions - kink).abs().min() > 1e-3 for kink in kinks)
    function, inputs = LOSSES[name](batch)
    assert torch.autograd.gradcheck(function, inputs)


# other objectives, against slow loops


@properties
@given(batches(), st.floats(0.05, 0.5), st.floats(1.01, 4.0))
def test_rule_15_dual_clip_bounds_the_loss_of_bad_tokens(batch: Batch, clip: float, bound: float) -> None:
    slow = []
    for new, old, a in zip(*map(batch.real, (batch.logprobs, batch.old_logprobs, batch.advantages)), strict=True):
        ratio = math.exp(4 * new - 4 * old)
        gain = min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a)
        slow.append(max(gain, bound * a) if a < 0 else gain)
    loss = compute_ppo_loss(
        4 * batch.logprobs, 4 * batch.old_logprobs, batch.advantages, clip, batch.mask, dual_clip=bound
    )
    assert loss.item() == pytest.approx(-mean(slow), abs=1e-12)


def test_rule_15_a_dual_clip_that_cuts_the_first_ratio_is_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="above 1"):
        compute_ppo_loss(one, one, one, dual_clip=1.0)


@properties
@given(batches())
def test_the_gradient_of_ppo_is_the_plain_policy_gradient_at_ratio_1(batch: Batch) -> None:
    """Before the first update; the clip does not bite there. So PPO's own loss serves the policy-gradient warm-up."""
    plain = -(batch.logprobs * batch.advantages.detach())[batch.mask].mean()
    ppo = compute_ppo_loss(batch.logprobs, batch.logprobs.detach(), batch.advantages, 0.2, batch.mask)
    gradients = [torch.autograd.grad(loss, batch.logprobs)[0] for loss in (plain, ppo)]
    assert torch.allclose(*gradients, atol=1e-12)


@properties
@given(batches(), st.floats(0.2, 3.0))
def test_rule_07_importance_weights_are_truncated(batch: Batch, cap: float) -> None:
    slow = [
        min(math.exp(old - engine), cap)
        for old, engine in zip(batch.real(batch.logprobs), batch.real(batch.old_logprobs), strict=True)
    ]
    weights = importance_weights(batch.logprobs, batch.old_logprobs, cap, batch.mask)
    assert not weights.requires_grad
    assert batch.real(weights) == pytest.approx(slow, abs=1e-12)
    loss = compute_ppo_loss(batch.logprobs, batch.logprobs.detach(), batch.advantages, 0.2, batch.mask, weights=weights)
    products = [w * a for w, a in zip(slow, batch.real(batch.advantages), strict=True)]
    assert loss.item() == pytest.approx(-mean(products), abs=1e-12)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_rule_18_no_objective_includes_padding(garbage: float) -> None:
    def results(batch: Batch) -> list[Tensor]:
        weights = importance_weights(batch.old_logprobs, batch.values, 2.0, batch.mask)
        parts = (batch.logprobs, batch.old_logprobs, batch.advantages)
        losses = [
            compute_ppo_loss(*parts, 0.2, batch.mask, dual_clip=3.0, weights=weights),
        ]
        losses += [
            compute_kl_loss(batch.logprobs, batch.old_logprobs, batch.values, kind, batch.mask)
            for kind in ("rho_k1", "rho_k3", "k2")
        ]
        return [*losses, *(torch.autograd.grad(loss, batch.logprobs, retain_graph=True)[0] for loss in losses)]

    for clean, corrupt in zip(results(Batch([3, 5], 7)), results(Batch([3, 5], 7, garbage)), strict=True):
        assert torch.equal(clean, corrupt)


def categorical_kl(theta: Tensor, reference: Tensor) -> Tensor:
    logp, logq = theta.log_softmax(0), reference.log_softmax(0)
    return (logp.exp() * (logp - logq)).sum()


@pytest.mark.parametrize("kind", ["rho_k1", "rho_k3"])
def test_rule_15_a_kl_loss_with_its_ratio_has_the_gradient_of_the_kl(kind: str) -> None:
    """Expected over all actions, exactly, also where π_θ has left π_old. Plain k1 and k3 have another one."""
    torch.manual_seed(3)
    theta, old, reference = torch.randn(3, 6, dtype=torch.float64).unbind()
    theta.requires_grad_()
    logprobs, old_logprobs, ref_logprobs = (x.log_softmax(0) for x in (theta, old, reference))
    share = old_logprobs.exp()
    expected = sum(
        share[a] * compute_kl_loss(logprobs[a], old_logprobs[a], ref_logprobs[a], kind)
        for a in range(6)  # type: ignore[arg-type]
    )
    true = torch.autograd.grad(categorical_kl(theta, reference), theta)[0]
    assert torch.allclose(torch.autograd.grad(expected, theta, retain_graph=True)[0], true, atol=1e-12)


def test_rule_15_the_gradient_of_k2_is_that_of_the_kl_at_the_old_policy() -> None:
    torch.manual_seed(4)
    theta, reference = torch.randn(2, 6, dtype=torch.float64).unbind()
    theta.requires_grad_()
    logprobs, ref_logprobs = theta.log_softmax(0), reference.log_softmax(0)
    share = logprobs.detach().exp()
    expected = sum(
        share[a] * compute_kl_loss(logprobs[a], logprobs[a].detach(), ref_logprobs[a], "k2") for a in range(6)
    )
    true = torch.autograd.grad(categorical_kl(theta, reference), theta, retain_graph=True)[0]
    assert torch.allclose(torch.autograd.grad(expected, theta)[0], true, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "full"])
def test_rule_15_diagnostics_are_no_kl_losses(kind: str) -> None:
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match="no KL loss"):
        compute_kl_loss(zero, zero, zero, kind)  # type: ignore[arg-type]
