"""Advantages from token rewards and values: generalised advantage estimation, group baselines, and whitening. Pure
functions of tensors."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from rlhf_core.models.masked import masked_mean, masked_var, zero_padding

GroupBaseline = Literal["reinforce", "rloo", "grpo", "dr_grpo"]
VARIANCE_FLOOR = 1e-8


def compute_gae(
    rewards: Float[Tensor, "*batch time"],
    values: Float[Tensor, "*batch time_plus_1"],
    gamma: float = 1.0,
    lam: float = 0.95,
    mask: Shaped[Tensor, "*batch time"] | None = None,
) -> tuple[Float[Tensor, "*batch time"], Float[Tensor, "*batch time"]]:
    """Advantages and returns by generalised advantage estimation, backward over the real tokens only.

    δ_t = r_t + γ·V(s_{t+1}) − V(s_t);  A_t = δ_t + γλ·A_{t+1};  return_t = A_t + V(s_t).

    Args:
        rewards: [B, T] (or [T]) shaped token rewards, in units of the score.
        values: [B, T+1] (or [T+1]) V(s_t), read where the next token is action t.
        gamma: discount γ.
        lam: λ; 0 gives the one-step error, 1 the Monte Carlo return minus the value.
        mask: [B, T], 1 on real tokens. With it V after a row's last real token is 0, even at T (a truncated
            response has ended too), so `values[:, T]` is not read. Without it every token is real and V(s_T)
            is `values[:, T]`.

    Returns:
        advantages [B, T], not whitened, and returns [B, T]; both 0 on padding.

    Raises:
        ValueError: `values` is not one longer than `rewards`, or `mask` has another shape than `rewards`.

    Source: Schulman et al. 2016, equations 11 to 16; rules 9 and 10.
    """
    time = rewards.shape[-1]
    if values.shape[-1] != time + 1:
        raise ValueError(
            f"{time} rewards a row need {time + 1} values (the last: after the end), not {values.shape[-1]}"
        )
    state_values = zero_padding(values[..., :time], mask)
    real = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
    next_value = values[..., time] if mask is None else torch.zeros_like(values[..., time])
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(time)):
        delta = rewards[..., t] + gamma * next_value - state_values[..., t]
        advantage = delta + gamma * lam * next_advantage
        next_advantage = torch.where(real[..., t], advantage, next_advantage)
        next_value = torch.where(real[..., t], state_values[..., t], next_value)
        advantages[..., t] = torch.where(real[..., t], advantage, 0)
    return advantages, advantages + state_values


def reward_to_go(
    rewards: Float[Tensor, "*batch time"], mask: Shaped[Tensor, "*batch time"] | None = None
) -> Float[Tensor, "*batch time"]:
    """Σ of the rewards from each token on, without discount, in units of the score; 0 on padding. Unlike the returns of
    `compute_gae` it contains no value of the critic, so the critic is measured against it (rule 28)."""
    return zero_padding(zero_padding(rewards, mask).flip(-1).cumsum(-1).flip(-1), mask)


def compute_group_advantages(
    returns: Float[Tensor, "batch"], kind: GroupBaseline, samples_per_prompt: int = 1
) -> Float[Tensor, "batch"]:
    """Advantages of whole answers without a critic; the baseline comes from other answers.

    With G the return of an answer (its score less β times its KL):
    `reinforce`: G minus the mean of the batch;  `rloo`: G minus the mean of the *other* answers to the same prompt,
    which leaves the gradient unbiased;  `grpo`: (G − μ)/√(σ² + 1e-8), mean and population variance of the answers to
    the same prompt;  `dr_grpo`: G − μ.

    Args:
        returns: [B] in units of the score; the answers to one prompt are next to each other.
        kind: `reinforce`, `rloo`, `grpo` or `dr_grpo`.
        samples_per_prompt: k, answers to each prompt.

    Returns:
        [B], the same for every token of an answer; in units of the score (`grpo`: without unit).

    Raises:
        ValueError: another `kind`, a batch that is no multiple of k, or k below 2 where a prompt's answers are
            compared.

    Source: Williams 1992; Ahmadian et al. 2024, equation 8 (RLOO); Shao et al. 2024, section 4.1.2 (GRPO); Liu et al.
    2025, "Understanding R1-Zero-Like Training" (Dr. GRPO); rule 12.
    """
    if kind == "reinforce":
        return returns - returns.mean()
    if kind not in ("rloo", "grpo", "dr_grpo"):
        raise ValueError(f"unknown baseline: {kind!r} (there are reinforce, rloo, grpo and dr_grpo)")
    if samples_per_prompt < 2 or len(returns) % samples_per_prompt:
        raise ValueError(
            f"{kind} compares k ≥ 2 answers to each prompt; {len(returns)} answers, k {samples_per_prompt}"
        )
    groups = returns.view(-1, samples_per_prompt)
    centred = groups - groups.mean(dim=1, keepdim=True)
    if kind == "rloo":
        return (centred * samples_per_prompt / (samples_per_prompt - 1)).flatten()
    if kind == "dr_grpo":
        return centred.flatten()
    variance = (centred**2).mean(dim=1, keepdim=True)
    return (centred / torch.sqrt(variance + VARIANCE_FLOOR)).flatten()


def compute_gdpo_advantages(
    terms: Sequence[tuple[float, Float[Tensor, "batch"]]], samples_per_prompt: int
) -> Float[Tensor, "batch"]:
    """Σ_k w_k·(G_k − μ_k)/√(σ_k² + 1e-8): each term of the score is compared within the group by its own mean and
    deviation. So its unit does not matter, as long as deviations are far above 1e-4, and answers that differ in one
    term never look alike. The published method then whitens the sums over the batch (`whiten`): the caller does.

    Args:
        terms: weight and values [B] of each term; the answers to one prompt are next to each other. A term that does
            not vary in a group adds 0 there.
        samples_per_prompt: k ≥ 2, answers to each prompt.

    Raises:
        ValueError: no term, or see `compute_group_advantages`.

    Source: Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization", equations 4 to 6; the
    authors' code whitens over tokens, the paper's equation is over answers.
    """
    if not terms:
        raise ValueError("gdpo needs the terms of the score")

    def compared(values: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
        groups = values.view(-1, samples_per_prompt)  # from the group's first, so that equal values differ by exactly 0
        return compute_group_advantages((groups - groups[:, :1]).flatten(), "grpo", samples_per_prompt)

    each = [weight * compared(values) for weight, values in terms]
    return torch.stack(each).sum(dim=0)


def equal_groups(scores: Float[Tensor, "batch"], samples_per_prompt: int) -> Bool[Tensor, "batch"]:
    """[B], true for answers whose group (the `samples_per_prompt` answers to one prompt, next to each other) has one
    and the same score: they say nothing about which answer is better. Yu et al. 2025 (DAPO), section 3.2."""
    groups = scores.view(-1, samples_per_prompt)
    return (groups == groups[:, :1]).all(dim=1).repeat_interleave(samples_per_prompt)


def whiten(
    x: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"] | None = None, shift_mean: bool = True
) -> Float[Tensor, "*shape"]:
    """(x − μ) / √(σ² + 1e-8), with μ and the population variance σ² over the real tokens only.

    Args:
        x: any shape; give the whole batch, not a micro-batch (rule 11).
        mask: same shape, 1 on real tokens.
        shift_mean: `False` adds μ back, so that only the scale changes.

    Returns:
        The shape of `x`, without unit; 0 on padding.

    Source: Huang et al. 2024, "The N+ Implementation Details of RLHF with PPO"; rule 11.
    """
    real = zero_padding(x, mask)
    mean = masked_mean(real, mask)
    white = (real - mean) / deviation(real, mask)
    return zero_padding(white if shift_mean else white + mean, mask)


def deviation(x: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"] | None = None) -> Float[Tensor, ""]:
    """√(σ² + 1e-8) over the real tokens: what `whiten` divides by."""
    return torch.sqrt(masked_var(x, mask) + VARIANCE_FLOOR)
