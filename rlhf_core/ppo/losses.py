"""The losses of PPO as pure functions of tensors: policy, value and KL losses, and the entropy bonus. All are over real
tokens only."""

from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlhf_core.config.ppo import RatioKind
from rlhf_core.models.masked import entropy_of, masked_log_softmax, masked_mean, masked_sum, zero_padding
from rlhf_core.ppo.kl import estimate_kl

Reduction = Literal["mean", "sum", "none"]
KLLossKind = Literal["rho_k1", "rho_k3", "k2", "k3"]


def policy_ratio(
    logprobs: Float[Tensor, "*batch time"],
    old_logprobs: Float[Tensor, "*batch time"],
    kind: RatioKind = "token",
    mask: Shaped[Tensor, "*batch time"] | None = None,
) -> Float[Tensor, "*batch time"]:
    """ρ of each token: exp(log π_θ − log π_old); with `sequence` that of its whole answer, the same for all its tokens:
    exp of the mean of log π_θ − log π_old over the answer's real tokens. 1 on padding (`token`).

    Source: Schulman et al. 2017; Zheng et al. 2025, "Group Sequence Policy Optimization", equation 7.
    """
    change = zero_padding(logprobs - old_logprobs, mask)
    if kind == "sequence":
        count = change.shape[-1] if mask is None else mask.sum(dim=-1, keepdim=True).clamp(min=1)
        change = (change.sum(dim=-1, keepdim=True) / count).expand_as(change)
    return torch.exp(change)


def compute_ppo_loss(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    clip_ratio: float = 0.2,
    mask: Shaped[Tensor, "*shape"] | None = None,
    *,
    clip_ratio_high: float | None = None,
    ratio: RatioKind = "token",
    dual_clip: float | None = None,
    weights: Float[Tensor, "*shape"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Clipped surrogate −min(ρA, clip(ρ, 1−ε, 1+ε_high)A) with ρ of `policy_ratio`.

    Args:
        logprobs: [B, T] log π_θ of the sampled tokens, nats; carries the gradient.
        old_logprobs: [B, T] log π_old of the same tokens, nats.
        advantages: [B, T], usually whitened.
        clip_ratio: ε.
        mask: [B, T], 1 on real tokens.
        clip_ratio_high: ε_high; `None`: ε.
        ratio: `token`, or `sequence` with advantages that are the same for all tokens of an answer: the mean of an
            answer's tokens is then GSPO's objective, and its gradient s·A·(mean over tokens of ∇log π).
        dual_clip: c above 1: where A < 0 the gain is at least c·A. `None`: no bound.
        weights: [B, T] detached weights of the tokens (`importance_weights`); `None`: all 1.
        reduction: `mean` over the real tokens, their `sum`, or `none`: the loss of each token, which the trainer
            adds up and divides by the real tokens of the whole minibatch, so that micro-batches sum to its gradient
            (rule 13).

    Returns:
        A scalar, 0 where no token is real; with `none` [B, T], 0 on padding.

    Raises:
        ValueError: `dual_clip` not above 1.

    Source: Schulman et al. 2017, equation 7; dual clip: Ye et al. 2020, equation 5; ε_high: Yu et al. 2025 (DAPO),
    equation 8; `sequence`: Zheng et al. 2025 (GSPO), equations 5 to 7; seeds 000 and 004; rule 15.
    """
    rho, high = policy_ratio(logprobs, old_logprobs, ratio, mask), clip_ratio_high or clip_ratio
    advantages = zero_padding(advantages, mask)
    gain = torch.min(rho * advantages, torch.clamp(rho, 1 - clip_ratio, 1 + high) * advantages)
    if dual_clip is not None:
        if not dual_clip > 1:
            raise ValueError(f"the dual clip bounds ratios above 1 only: give a number above 1, not {dual_clip}")
        gain = torch.where(advantages < 0, torch.max(gain, dual_clip * advantages), gain)
    return -_reduce(_weighted(gain, weights, mask), mask, reduction)


def compute_kl_loss(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    ref_logprobs: Float[Tensor, "*shape"],
    kind: KLLossKind,
    mask: Shaped[Tensor, "*shape"] | None = None,
    *,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """KL(π_θ ‖ π_ref) per token as a loss, in nats, on tokens that π_old sampled.

    Args:
        logprobs, old_logprobs, ref_logprobs: [B, T] log π of the sampled tokens; the first carries the gradient.
        kind: `rho_k1` and `rho_k3` weigh the estimate by ρ = π_θ/π_old and let the gradient through ρ; `k2` needs
            no ratio (its gradient is that of the KL while π_θ is near π_old). `k3` is that of GRPO as published (Shao
            et al. 2024, equation 4), without the ratio: its gradient is that of KL(π_ref ‖ π_θ).
        mask, reduction: as in `compute_ppo_loss`.

    Raises:
        ValueError: another `kind`. Plain `k1` has expected gradient 0: it is a diagnostic. The exact KL takes logits:
            `exact_kl`.

    Source: Schulman 2020; rule 15.
    """
    if kind in ("k2", "k3"):
        return _reduce(estimate_kl(logprobs, ref_logprobs, kind, mask), mask, reduction)
    if kind not in ("rho_k1", "rho_k3"):
        raise ValueError(f"{kind!r} is no KL loss on sampled tokens (there are rho_k1, rho_k3, k2 and k3)")
    ratio = torch.exp(zero_padding(logprobs - old_logprobs, mask))
    estimate = estimate_kl(logprobs, ref_logprobs, "k1" if kind == "rho_k1" else "k3", mask)
    return _reduce(ratio * estimate, mask, reduction)


@torch.no_grad()
def importance_weights(
    old_logprobs: Float[Tensor, "*shape"],
    engine_logprobs: Float[Tensor, "*shape"],
    cap: float,
    mask: Shaped[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """min(exp(log π_old − log π_engine), cap) per token, without gradient; 0 on padding.

    It corrects the policy loss for samples of an engine whose probabilities differ from the trained model's.
    Source: truncated importance sampling, Ionides 2008; rule 7.
    """
    return zero_padding(torch.exp(zero_padding(old_logprobs - engine_logprobs, mask)).clamp(max=cap), mask)


def compute_value_loss(
    values: Float[Tensor, "*shape"],
    returns: Float[Tensor, "*shape"],
    old_values: Float[Tensor, "*shape"] | None = None,
    clip_value: bool = True,
    clip_ratio: float = 0.2,
    mask: Shaped[Tensor, "*shape"] | None = None,
    *,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Squared error of the critic, the larger of clipped and unclipped, without ½.

    Args:
        values: [B, T] V_θ(s_t); carries the gradient.
        returns: [B, T] from `compute_gae`, before whitening.
        old_values: [B, T] the critic's values at the rollout; `None`: no clip.
        clip_value: `False`: no clip.
        clip_ratio: how far a value may move from its old one, in units of the score (rule 16).
        mask: [B, T], 1 on real tokens.
        reduction: `mean` over the real tokens, or their `sum` (see `compute_ppo_loss`).

    Returns:
        A scalar, in squared units of the score; 0 where no token is real.

    Source: Schulman et al. 2017's code; Huang et al. 2024; rule 15.
    """
    values, returns = zero_padding(values, mask), zero_padding(returns, mask)
    loss = (values - returns) ** 2
    if clip_value and old_values is not None:
        old_values = zero_padding(old_values, mask)
        clipped_values = old_values + torch.clamp(values - old_values, -clip_ratio, clip_ratio)
        loss = torch.max(loss, (clipped_values - returns) ** 2)
    return _reduce(loss, mask, reduction)


def compute_entropy(
    logits: Float[Tensor, "*shape vocab"] | None,
    mask: Shaped[Tensor, "*shape"] | None = None,
    *,
    of_tokens: Float[Tensor, "*shape"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Tensor, "..."]:
    """Entropy −Σ_v p(v)·log p(v) of `softmax(logits)`, in nats: mean (or `sum`) over the real tokens.

    `logits` are [..., V], already divided by the temperature; `mask` is [...]. `of_tokens`: the entropies [...] instead
    of logits, where a pass has computed them chunk by chunk (`logprobs_and_entropy`). Raises ValueError for both of
    them, or neither.
    """
    if (logits is None) == (of_tokens is None):
        raise ValueError("give the logits or the entropy of each token, one of the two")
    if of_tokens is None:
        of_tokens = entropy_of(masked_log_softmax(logits, mask))  # type: ignore[arg-type]
    return _reduce(of_tokens, mask, reduction)


def compute_ppo_total_loss(
    policy_logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    values: Float[Tensor, "*shape"],
    returns: Float[Tensor, "*shape"],
    logits: Float[Tensor, "*shape vocab"] | None,
    clip_ratio: float = 0.2,
    vf_coef: float = 0.5,
    entropy_coef: float = 0.01,
    *,
    mask: Shaped[Tensor, "*shape"] | None = None,
    old_values: Float[Tensor, "*shape"] | None = None,
    clip_value: bool = True,
    value_clip_ratio: float = 0.2,
    entropy: Float[Tensor, "*shape"] | None = None,
    clip_ratio_high: float | None = None,
    ratio: RatioKind = "token",
    dual_clip: float | None = None,
    weights: Float[Tensor, "*shape"] | None = None,
    reduction: Reduction = "mean",
) -> dict[str, Float[Tensor, ""]]:
    """policy loss + `vf_coef`·value loss − `entropy_coef`·entropy, and the three parts: what the trainer minimises.

    Args:
        policy_logprobs, old_logprobs, advantages, clip_ratio, clip_ratio_high, ratio, dual_clip, weights: as in
            `compute_ppo_loss`.
        values, returns, old_values, clip_value: as in `compute_value_loss`; `value_clip_ratio` is its own
            clip.
        logits, entropy: [B, T, V] of the policy, or [B, T] entropies in nats, as in `compute_entropy`. With
            `entropy_coef` 0 the entropy gets no gradient.
        mask, reduction: for all three parts.

    Returns:
        Scalars `total_loss`, `policy_loss`, `value_loss`, `entropy`.

    Raises:
        ValueError: both of `logits` and `entropy` are given, or neither.

    Source: Schulman et al. 2017, equation 9; seed 004; rule 15.
    """
    policy_loss = compute_ppo_loss(
        policy_logprobs,
        old_logprobs,
        advantages,
        clip_ratio,
        mask,
        clip_ratio_high=clip_ratio_high,
        ratio=ratio,
        dual_clip=dual_clip,
        weights=weights,
        reduction=reduction,
    )
    value_loss = compute_value_loss(
        values, returns, old_values, clip_value, value_clip_ratio, mask, reduction=reduction
    )
    entropy_term = compute_entropy(logits, mask, of_tokens=entropy, reduction=reduction)
    bonus = entropy_coef * entropy_term if entropy_coef else 0.0
    return {
        "total_loss": policy_loss + vf_coef * value_loss - bonus,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy_term,
    }


def _weighted(
    gain: Float[Tensor, "*shape"], weights: Float[Tensor, "*shape"] | None, mask: Shaped[Tensor, "*shape"] | None
) -> Float[Tensor, "*shape"]:
    return gain if weights is None else gain * zero_padding(weights, mask)


def _reduce(
    x: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"] | None, reduction: Reduction
) -> Float[Tensor, "..."]:
    if reduction == "mean":
        return masked_mean(x, mask)
    if reduction == "sum":
        return masked_sum(x, mask)
    if reduction == "none":
        return zero_padding(x, mask)
    raise ValueError(f"unknown reduction: {reduction!r} (there are mean, sum and none)")
