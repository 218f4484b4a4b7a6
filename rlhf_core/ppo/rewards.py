"""Token rewards from the score of a response: normalisation, the penalty for a response without an end, and the KL
penalty."""

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlhf_core.models.masked import zero_padding


def normalise_scores(
    scores: Float[Tensor, "batch"], mean: float, std: float, clip: float | None = None
) -> Float[Tensor, "batch"]:
    """(score − mean) / std, then clipped to ±`clip`: the first two steps of rule 12, before any penalty.

    Args:
        scores: [B] raw scores.
        mean: of the reward model on reference responses, frozen before the first step.
        std: of the same scores; 0 (all equal): the scores are only centred.
        clip: in standard deviations; `None`: no clip.

    Raises:
        ValueError: `std` negative or not finite, `mean` not finite, or `clip` not above 0.

    Source: Ziegler et al. 2019; Huang et al. 2024; rule 12.
    """
    if not (math.isfinite(mean) and 0 <= std < math.inf):
        raise ValueError(f"scores cannot be normalised with mean {mean} and standard deviation {std}")
    if clip is not None and not clip > 0:
        raise ValueError(f"scores are clipped to plus or minus a number above 0, not {clip}")
    normal = (scores - mean) / (std if std > 0 else 1.0)
    return normal if clip is None else normal.clamp(-clip, clip)


def penalise_missing_eos(
    scores: Float[Tensor, "batch"], ended: Shaped[Tensor, "batch"], penalty: float
) -> Float[Tensor, "batch"]:
    """The scores [B], lowered by `penalty` (in units of the normalised score) where `ended` [B] is false.

    `ended`: the response contains a stop token. The penalty comes after normalising and clipping (rules 4 and 12).
    """
    return torch.where(ended.bool(), scores, scores - penalty)


def shape_rewards(
    scores: Float[Tensor, "batch"],
    kl: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    kl_coef: float,
) -> Float[Tensor, "batch time"]:
    """Token rewards r_t = −β·KL_t, and the score R added once, at the last real token.

    So Σ_t r_t = R − β·Σ_t KL_t in every row.

    Args:
        scores: [B] R, normalised, clipped and penalised.
        kl: [B, T] k1 estimates, nats. In a reward only k1 leaves the optimum where it is (rule 8).
        mask: [B, T], 1 on real tokens. The last of them is the end-of-sequence token where there is one.
        kl_coef: β, units of the score per nat.

    Returns:
        [B, T] in units of the score; 0 on padding. A row without a real token gets no score.

    Raises:
        ValueError: shapes of `kl` and `mask` that differ.

    Source: Ziegler et al. 2019, equation 2; Stiennon et al. 2020; rules 4 and 8.
    """
    real = mask.bool()
    is_last = real & (real.flip(-1).cumsum(-1).flip(-1) == 1)
    return -kl_coef * zero_padding(kl, mask) + torch.where(is_last, scores.unsqueeze(-1), 0)
