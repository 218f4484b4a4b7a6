"""The losses over preference pairs: Bradley-Terry for reward models, DPO and IPO for policies. Pure functions of
tensors with one number a pair; every loss is the mean over the pairs."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(
    chosen: Float[Tensor, "batch"], rejected: Float[Tensor, "batch"], margin: Float[Tensor, "batch"] | None = None
) -> Float[Tensor, ""]:
    """−E log σ(R(chosen) − R(rejected) − margin), in nats (Ouyang et al. 2022, equation 1; the margin: Touvron et al.
    2023)."""
    gap = chosen - rejected
    return -logsigmoid(gap if margin is None else gap - margin).mean()


def implicit_margin(
    chosen: Float[Tensor, "pairs"],
    rejected: Float[Tensor, "pairs"],
    ref_chosen: Float[Tensor, "pairs"],
    ref_rejected: Float[Tensor, "pairs"],
    scale: float,
) -> Float[Tensor, "pairs"]:
    """r(chosen) − r(rejected) of each pair, where r = scale·(log π − log π_ref) is the implicit reward (Rafailov et al.
    2023, section 5; scale is β there). Log-probabilities [pairs] summed over the response, in nats."""
    return scale * ((chosen - ref_chosen) - (rejected - ref_rejected))


def dpo_loss(margin: Float[Tensor, "pairs"], label_smoothing: float = 0.0) -> Float[Tensor, ""]:
    """−E[(1−ε)·log σ(m) + ε·log σ(−m)]: equation 7 of Rafailov et al. 2023 (ε = 0).

    Args:
        margin: m [pairs], the implicit margin with β.
        label_smoothing: ε, the assumed share of pairs with the wrong label (conservative DPO, Mitchell 2023).

    Returns:
        The mean over the pairs, in nats; log 2 where policy and reference are the same.
    """
    return -((1 - label_smoothing) * logsigmoid(margin) + label_smoothing * logsigmoid(-margin)).mean()


def ipo_loss(margin: Float[Tensor, "pairs"], tau: float) -> Float[Tensor, ""]:
    """E[(h − 1/(2τ))²]: equation 17 of Azar et al. 2023 (https://arxiv.org/abs/2310.12036).

    Args:
        margin: τ·h [pairs], the implicit margin with τ; h is log(π/π_ref) of the chosen less that of the rejected
            response, each summed over the tokens of the response as in the paper, in nats.
        tau: the strength of the KL regularisation.

    Returns:
        The mean over the pairs; 1/(2τ)² where policy and reference are the same.
    """
    return ((margin / tau - 1 / (2 * tau)) ** 2).mean()


def order_right(gap: Float[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
    """1 where the chosen response's score, or implicit reward, is higher by `gap` > 0; ½ for equal ones, else 0."""
    return (gap > 0).to(gap.dtype) + 0.5 * (gap == 0).to(gap.dtype)
