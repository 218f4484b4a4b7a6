"""Log-probabilities of actions and entropies from logits. The rows are processed in pieces that fit the cache, so that
the only other [B, T, V] tensor is the gradient of the logits."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_core.models.masked import masked_log_softmax, zero_padding

PIECE_ON_CPU = 2**18
"""Logits of a piece; no result depends on it."""
PIECE_ON_ACCELERATOR = 2**26


def logprobs_and_entropy(
    logits: Float[Tensor, "*shape vocab"],
    actions: Int[Tensor, "*shape"],
    temperature: float = 1.0,
    mask: Shaped[Tensor, "*shape"] | None = None,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Log-probability of each action and entropy of each distribution, under `softmax(logits / temperature)`.

    Args:
        logits: [B, T, V], at the positions whose next token is the action.
        actions: [B, T] sampled token ids; on padding any number.
        temperature: of the sampling, the same for π_old, π_ref and π_θ (rule 5).
        mask: [B, T], 1 on real tokens.

    Returns:
        logprobs [B, T] and entropy [B, T], in nats, float32 (float64 for float64 logits); both 0 on padding, where no
        logit gets a gradient.

    Raises:
        ValueError: a temperature that is not above 0, or a mask of another shape than the actions.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    real = None if mask is None else mask.bool()
    apply = _LogProbsAndEntropy.apply
    logprobs, entropy = apply(logits, zero_padding(actions, real), temperature, real)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class Compared(NamedTuple):
    """Two models on the same tokens: [B, T] each, in nats, 0 on padding, without gradient."""

    logprobs: Float[Tensor, "*shape"]
    """log π of the actions."""
    ref_logprobs: Float[Tensor, "*shape"]
    """log π_ref of the actions."""
    kl: Float[Tensor, "*shape"]
    """The exact KL(π ‖ π_ref) = Σ_v π(v)·(log π(v) − log π_ref(v)) of each position's distribution."""
    entropy: Float[Tensor, "*shape"]
    """Of π."""


@torch.no_grad()
def compare_distributions(
    logits: Float[Tensor, "*shape vocab"],
    ref_logits: Float[Tensor, "*shape vocab"],
    actions: Int[Tensor, "*shape"],
    temperature: float,
    mask: Shaped[Tensor, "*shape"] | None = None,
) -> Compared:
    """Log-probabilities, exact KL and entropy; arguments as in `logprobs_and_entropy`."""
    keep, chosen = None if mask is None else mask.bool().reshape(-1), zero_padding(actions, mask).reshape(-1)
    ours, theirs = logits.reshape(-1, logits.shape[-1]), ref_logits.reshape(-1, logits.shape[-1])
    found = torch.zeros(4, len(chosen), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    for rows in _pieces(ours):
        real = None if keep is None else keep[rows]
        log_p, log_q = (masked_log_softmax(flat[rows], real, temperature) for flat in (ours, theirs))
        p = log_p.exp()
        found[0, rows] = log_p.gather(1, chosen[rows, None])[:, 0]
        found[1, rows] = log_q.gather(1, chosen[rows, None])[:, 0]
        found[2, rows] = (p * (log_p - log_q)).sum(dim=1)
        found[3, rows] = -(p.mul_(log_p)).sum(dim=1)
    return Compared(*(found if keep is None else torch.where(keep, found, 0)).view(4, *actions.shape))


def compare_logprobs(
    logits: Float[Tensor, "*shape vocab"],
    ref_logits: Float[Tensor, "*shape vocab"],
    actions: Int[Tensor, "*shape"],
    temperature: float,
    mask: Shaped[Tensor, "*shape"] | None = None,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Of two models on the same tokens: log π, log π_ref, and the exact KL(π ‖ π_ref) of each token's distribution.

    Arguments as in `logprobs_and_entropy`. Three [B, T] in nats, 0 on padding, without gradient.
    """
    return compare_distributions(logits, ref_logits, actions, temperature, mask)[:3]


class _LogProbsAndEntropy(torch.autograd.Function):
    """∂ log p_a / ∂z_j = 1[j = a] − p_j;  ∂H / ∂z_j = −p_j·(log p_j + H);  z = logits / temperature."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, actions: Tensor, temperature: float, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """log p_a and H of each token, in nats, piece by piece; 0 on padding."""
        precision = torch.promote_types(logits.dtype, torch.float32)
        logprobs = torch.empty(actions.numel(), dtype=precision, device=logits.device)
        entropy = torch.empty_like(logprobs)
        flat, chosen = logits.reshape(-1, logits.shape[-1]), actions.reshape(-1)
        keep = None if real is None else real.reshape(-1)
        for rows in _pieces(flat):
            log_p = masked_log_softmax(flat[rows], None if keep is None else keep[rows], temperature)
            logprobs[rows] = log_p.gather(1, chosen[rows, None])[:, 0]
            entropy[rows] = -(log_p.exp().mul_(log_p)).sum(dim=1)
        ctx.save_for_backward(flat, chosen, keep, entropy)
        ctx.temperature, ctx.shape = temperature, logits.shape
        ctx.set_materialize_grads(False)
        logprobs, given = zero_padding(logprobs, keep), zero_padding(entropy, keep)
        return logprobs.view(actions.shape), given.view(actions.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, to_logprobs: Tensor | None, to_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        """The gradient of the logits; log p is computed again instead of kept."""
        flat, chosen, keep, entropy = ctx.saved_tensors
        if to_logprobs is None and to_entropy is None:
            return None, None, None, None
        gradient = torch.empty_like(flat)
        towards = torch.zeros_like(entropy) if to_logprobs is None else to_logprobs.reshape(-1)
        for rows in _pieces(flat):
            log_p = masked_log_softmax(flat[rows], None if keep is None else keep[rows], ctx.temperature)
            weight, place = towards[rows, None], gradient[rows]
            piece = torch.exp(log_p, out=place if place.dtype == log_p.dtype else None)
            if to_entropy is None:
                piece.mul_(-weight)
            else:
                spread = log_p.add_(entropy[rows, None]).mul_(to_entropy.reshape(-1)[rows, None])
                piece.mul_(spread.add_(weight).neg_())
            piece.scatter_add_(1, chosen[rows, None], weight)
            if ctx.temperature != 1:
                piece.div_(ctx.temperature)
            if keep is not None:
                piece.masked_fill_(~keep[rows, None], 0)
            if piece is not place:
                place.copy_(piece)
        return gradient.view(ctx.shape), None, None, None


def _pieces(flat: Tensor) -> Iterator[slice]:
    size = max(1, (PIECE_ON_CPU if flat.device.type == "cpu" else PIECE_ON_ACCELERATOR) // flat.shape[1])
    for start in range(0, flat.shape[0], size):
        yield slice(start, start + size)
