"""Sums, means and variances over the real tokens of a padded batch. Padding is removed by `torch.where` before any
computation, so that NaN or infinity on padding changes no value and no gradient. `mask=None`: every element is real."""

import torch
from jaxtyping import Float, Num, Shaped
from torch import Tensor

LOWEST = -1e4
"""Lowest log-probability; its exponential is 0 in float64, too."""


def zero_padding(x: Num[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"] | None) -> Num[Tensor, "*shape"]:
    """`x` with 0 on padding; its gradient there is 0 too.

    `mask` is bool or 0/1 of the shape of `x`; broadcasting would count tokens wrongly and raises ValueError.
    """
    if mask is None:
        return x
    if mask.shape != x.shape:
        raise ValueError(f"mask of shape {tuple(mask.shape)} for values of shape {tuple(x.shape)}: they must be equal")
    return torch.where(mask.bool(), x, 0)


def masked_sum(x: Num[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"] | None = None) -> Num[Tensor, ""]:
    """Sum over the real tokens; 0 where there is none."""
    return zero_padding(x, mask).sum()


def masked_mean(x: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"] | None = None) -> Float[Tensor, ""]:
    """Mean over the real tokens. A mask without any gives 0 with gradient 0, not NaN."""
    if mask is None:
        return x.mean()
    return masked_sum(x, mask) / mask.bool().sum().clamp(min=1)


def masked_var(x: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"] | None = None) -> Float[Tensor, ""]:
    """Population variance (divided by n, not n − 1) over the real tokens; 0 for one token or none."""
    real = zero_padding(x, mask)
    return masked_mean((real - masked_mean(real, mask)) ** 2, mask)


def entropy_of(
    logprobs: Float[Tensor, "*shape vocab"], p: Float[Tensor, "*shape vocab"] | None = None
) -> Float[Tensor, "*shape"]:
    """−Σ_v p(v)·log p(v) of each distribution, nats. `p`: exp of it, where it is known; without gradient it is
    overwritten, which saves a copy."""
    p = logprobs.exp() if p is None else p
    return -(p * logprobs if logprobs.requires_grad else p.mul_(logprobs)).sum(dim=-1)


def kl_of(
    logprobs: Float[Tensor, "*shape vocab"],
    ref_logprobs: Float[Tensor, "*shape vocab"],
    p: Float[Tensor, "*shape vocab"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Σ_v p(v)·(log p(v) − log q(v)) of each pair of distributions, nats; `p`: exp of the first, where it is known."""
    return ((logprobs.exp() if p is None else p) * (logprobs - ref_logprobs)).sum(dim=-1)


def masked_log_softmax(
    logits: Float[Tensor, "*shape vocab"],
    mask: Shaped[Tensor, "*shape"] | None = None,
    temperature: float = 1.0,
) -> Float[Tensor, "*shape vocab"]:
    """Log-probabilities of `softmax(logits / temperature)`, in nats.

    In float32, or float64 for float64 logits. On padding the distribution is uniform, without gradient, so that values
    computed from it are finite until the caller masks them. A logit of −∞ has the log-probability −1e4 and no gradient,
    so that p·log p is 0 there. Raises `ValueError` for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if mask is not None:
        logits = zero_padding(logits, mask.unsqueeze(-1).expand(*mask.shape, logits.shape[-1]))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)
    return logprobs.clamp(min=LOWEST) if logprobs.requires_grad else logprobs.clamp_(min=LOWEST)
