"""Token rewards from the score of a response: normalisation, the penalty for a response without an end, and the KL
penalty."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlhf_core.models.masked import zero_padding

Placement = Literal["token", "sequence_end"]


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


class RunningScale:
    """Divides scores by the standard deviation of all scores so far, this batch's included; their mean is kept. The
    unit of the reward, and with it the cost of a nat, changes during the run.

    Source: reward scaling, Engstrom et al. 2020, "Implementation Matters in Deep RL", with an answer as one step.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0.0, 0.0, 0.0

    def __call__(self, scores: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
        """Add the scores [B], and return them in units of the deviation so far (unchanged while it is 0)."""
        count, mean = float(len(scores)), scores.double().mean().item()
        squares = ((scores.double() - mean) ** 2).sum().item()
        total, away = self.count + count, mean - self.mean
        self.squares += squares + away**2 * self.count * count / total
        self.mean += away * count / total
        self.count = total
        deviation = math.sqrt(self.squares / self.count)
        return scores / deviation if deviation > 0 else scores

    def state_dict(self) -> dict[str, float]:
        """What the next batch's scale depends on."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


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
    placement: Placement = "token",
) -> Float[Tensor, "batch time"]:
    """Token rewards r_t = −β·KL_t, and the score R added once, at the last real token.

    So Σ_t r_t = R − β·Σ_t KL_t in every row.

    Args:
        scores: [B] R, normalised, clipped and penalised.
        kl: [B, T] k1 estimates, nats. In a reward only k1 leaves the optimum where it is (rule 8).
        mask: [B, T], 1 on real tokens. The last of them is the end-of-sequence token where there is one.
        kl_coef: β, units of the score per nat.
        placement: `token`: the KL of each token at that token; `sequence_end`: the sum at the last real token.

    Returns:
        [B, T] in units of the score; 0 on padding. A row without a real token gets no score.

    Raises:
        ValueError: another `placement`, or shapes of `kl` and `mask` that differ.

    Source: Ziegler et al. 2019, equation 2; Stiennon et al. 2020; rules 4 and 8.
    """
    penalties = -kl_coef * zero_padding(kl, mask)
    is_last = _last_real(mask)
    if placement == "token":
        return penalties + torch.where(is_last, scores.unsqueeze(-1), 0)
    if placement == "sequence_end":
        return torch.where(is_last, (scores + penalties.sum(dim=-1)).unsqueeze(-1), 0)
    raise ValueError(f"unknown placement of the KL penalty: {placement!r} (there are token and sequence_end)")


def _last_real(mask: Shaped[Tensor, "batch time"]) -> Shaped[Tensor, "batch time"]:
    """True on the last real token of each row, and nowhere in a row that has none."""
    real = mask.bool()
    real_from_here = real.flip(-1).cumsum(-1).flip(-1)
    return real & (real_from_here == 1)
