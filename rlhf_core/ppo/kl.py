"""Estimators of the KL to the reference, and the controllers of its coefficient β."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlhf_core.models.masked import kl_of, masked_log_softmax, zero_padding

KLKind = Literal["k1", "k2", "k3", "full"]
MAX_RELATIVE_ERROR = 0.2


def estimate_kl(
    logprobs: Float[Tensor, "*shape"],
    ref_logprobs: Float[Tensor, "*shape"],
    kind: KLKind,
    mask: Shaped[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """KL(π ‖ π_ref) per token, in nats, from the log-probabilities of tokens that π sampled.

    With d = log π − log π_ref:  k1 = d (unbiased, either sign);  k2 = d²/2 (biased, ≥ 0);
    k3 = exp(−d) − 1 + d (unbiased, ≥ 0). `full` is exact, Σ_v π(v)·(log π(v) − log π_ref(v)): both arguments are then
    the logits [..., V], divided by the temperature where there is one, and the answer is [...].

    Args:
        logprobs: log π of the sampled tokens, nats.
        ref_logprobs: log π_ref of the same tokens, nats.
        kind: `k1`, `k2`, `k3` or `full`.
        mask: the shape of the answer, 1 on real tokens; the estimate is 0 on padding.

    Raises:
        ValueError: another `kind`.

    Source: Schulman 2020, "Approximating KL Divergence"; rules 8 and 15.
    """
    if kind == "full":
        return zero_padding(kl_of(masked_log_softmax(logprobs, mask), masked_log_softmax(ref_logprobs, mask)), mask)
    difference = zero_padding(logprobs - ref_logprobs, mask)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    if kind == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"unknown estimate of the KL divergence: {kind!r} (there are k1, k2, k3 and full)")


class FixedKLController:
    """β, the cost of one nat of KL in units of the (normalised) score; it never changes."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, batch_size: int) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, float]:
        """β, for a checkpoint (rule 19)."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`."""
        self.coef = float(state["coef"])


class AdaptiveKLController(FixedKLController):
    """Moves β so that the KL of a sequence stays near `target` nats.

    e = clip(KL/target − 1, −0.2, 0.2);  β ← β·(1 + e·n/horizon), n the sequences of the batch.

    Args:
        coef: β at the start, above 0 (the rule multiplies: 0 would stay 0).
        target: wanted KL per sequence, in nats, above 0.
        horizon: sequences over which β moves by up to a factor e^0.2.

    Source: Ziegler et al. 2019, section 2.2; rule 17. `PPOConfig` refuses numbers outside these ranges, and batches
    above the horizon.
    """

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        super().__init__(coef)
        self.target, self.horizon = target, horizon

    def update(self, kl: float, batch_size: int) -> None:
        """Move β after a batch: `kl` is the mean over its `batch_size` sequences of their KL, in nats.

        Raises ValueError where `batch_size` is above the horizon (β could turn negative), or `kl` is not finite.
        """
        if batch_size > self.horizon:
            raise ValueError(f"a batch of {batch_size} is above the controller's horizon of {self.horizon:g} sequences")
        kl = float(kl)
        if not math.isfinite(kl):
            raise ValueError(f"the measured KL is {kl}: β cannot follow it")
        error = min(max(kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.coef *= 1 + error * batch_size / self.horizon
