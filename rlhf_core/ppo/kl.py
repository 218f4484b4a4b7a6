"""Estimators of the KL to the reference, and the controllers of its coefficient β."""

import math
from typing import Literal, Protocol

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlhf_core.errors import UserError
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


class KLController(Protocol):
    """Sets β, the cost of one nat of KL in units of the (normalised) score."""

    coef: float

    def update(self, kl: float, batch_size: int) -> None:
        """Adapt to the KL of a batch: the mean over its `batch_size` sequences of their KL, in nats."""

    def state_dict(self) -> dict[str, float]:
        """The state of the controller (rule 19)."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`."""


class _Coefficient:
    """β and its state in a checkpoint."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`."""
        self.coef = float(state["coef"])


class FixedKLController(_Coefficient):
    """β never changes. Raises `UserError` for a negative or infinite `coef`."""

    def __init__(self, coef: float) -> None:
        if not 0 <= coef < math.inf:
            raise UserError(f"The KL coefficient is {coef}: give a number of 0 or more.")
        super().__init__(coef)

    def update(self, kl: float, batch_size: int) -> None:
        """Nothing changes."""


class AdaptiveKLController(_Coefficient):
    """Moves β so that the KL of a sequence stays near `target` nats.

    e = clip(KL/target − 1, −0.2, 0.2);  β ← β·(1 + e·n/horizon), n the sequences of the batch.

    Args:
        coef: β at the start, above 0 (the rule multiplies: 0 would stay 0).
        target: wanted KL per sequence, in nats, above 0.
        horizon: sequences over which β moves by up to a factor e^0.2.
        batch_size: n, if known; it is then checked at once.

    Raises:
        UserError: a number outside its range, or n above the horizon (one step would move β by more than 20%,
            and beyond five horizons β would turn negative).

    Source: Ziegler et al. 2019, section 2.2; rule 17.
    """

    def __init__(self, coef: float, target: float, horizon: float, batch_size: int | None = None) -> None:
        for name, value in (("coefficient", coef), ("target", target), ("horizon", horizon)):
            if not 0 < value < math.inf:
                raise UserError(f"The {name} of the adaptive KL controller is {value}: give a number above 0.")
        super().__init__(coef)
        self.target = target
        self.horizon = horizon
        if batch_size is not None:
            self._refuse_beyond_horizon(batch_size)

    def update(self, kl: float, batch_size: int) -> None:
        """Move β after a batch: `kl` is the mean over its `batch_size` sequences of their KL, in nats.

        Raises `UserError` where `batch_size` is above the horizon, `ValueError` where `kl` is not finite.
        """
        self._refuse_beyond_horizon(batch_size)
        kl = float(kl)
        if not math.isfinite(kl):
            raise ValueError(f"the measured KL is {kl}: β cannot follow it")
        error = min(max(kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.coef *= 1 + error * batch_size / self.horizon

    def _refuse_beyond_horizon(self, batch_size: int) -> None:
        if batch_size > self.horizon:
            raise UserError(
                f"The horizon of the adaptive KL controller ({self.horizon:g} sequences) is smaller than the "
                f"batch ({batch_size}): give a horizon of at least {batch_size}."
            )
