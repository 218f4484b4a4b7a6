"""Statistics of an update (clip fractions, ratios, KL to the old policy, explained variance), over real tokens only."""

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlhf_core.config.ppo import PPOConfig, RatioKind
from rlhf_core.errors import NonFiniteError
from rlhf_core.models.masked import masked_mean, masked_var, zero_padding
from rlhf_core.ppo.kl import estimate_kl
from rlhf_core.ppo.losses import policy_ratio
from rlhf_core.ppo.objective import Pass
from rlhf_core.training.processes import Processes


@dataclass
class UpdateStatistics:
    """Sums over real tokens of one minibatch or more; `means` turns them into masked means."""

    tokens: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ratio_max: float = 0.0
    optimizer_steps: int = 0
    stopped_early: bool = False
    update_kl: float = 0.0
    """KL(π_old ‖ π_θ) after the update, nats per token."""
    last_epoch: "UpdateStatistics | None" = None
    """Statistics of the last epoch alone."""
    grad_norms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    grad_clipped: int = 0
    """Optimiser steps in which the policy's gradient was scaled down to the largest norm."""

    @torch.no_grad()
    def add_pass(self, forward: Pass, losses: dict[str, Tensor], config: PPOConfig) -> None:
        """Add one micro-batch; the losses are sums over its real tokens."""
        mask, new, old = forward.batch.mask, forward.logprobs, forward.old_logprobs
        limit, real = config.critic.value_clip, mask.sum()
        found = losses | {
            "clip_fraction": real
            * clip_fraction(
                *(new, old, forward.advantages, config.clip_ratio, mask),
                clip_ratio_high=config.clip_ratio_high,
                ratio=config.ratio,
            ),
            "value_clip_fraction": real * value_clip_fraction(forward.values, forward.old_values, limit, mask),
            "approx_kl": real * approx_kl(new, old, mask),
        }
        for name, total in zip(found, torch.stack(list(found.values())).tolist(), strict=True):
            self.sums[name] += total
        self.ratio_max = max(self.ratio_max, ratio_max(new, old, mask).item())

    def all_reduce(self, processes: Processes) -> None:
        """Sum over the processes; `tokens` is already that of the whole minibatch. Raises NonFiniteError, in all of
        them, for a loss that is NaN or infinite in one."""
        if processes.count > 1:
            names = sorted(set().union(*processes.gather([list(self.sums)])))
            sums = torch.tensor([self.sums[name] for name in names], dtype=torch.float64, device=processes.device)
            processes.all_reduce([sums])
            self.sums.update(zip(names, sums.tolist(), strict=True))
            self.ratio_max = max(processes.gather([self.ratio_max]))
        for name in ("total_loss", "ptx_loss"):
            if not math.isfinite(loss := self.sums.get(name, 0.0)):
                raise NonFiniteError(f"the loss is {loss}; lower the learning rate or clip the score")

    def add(self, minibatch: "UpdateStatistics") -> None:
        """Add another minibatch."""
        if self.last_epoch is not None:
            self.last_epoch.add(minibatch)
        for name, total in minibatch.sums.items():
            self.sums[name] += total
        self.tokens += minibatch.tokens
        self.ratio_max = max(self.ratio_max, minibatch.ratio_max)

    def mean(self, name: str) -> float:
        """One statistic, over real tokens; 0 where there is none."""
        return self.sums[name] / max(1, self.tokens)

    def means(self) -> dict[str, float]:
        """Every statistic of the update, as means over real tokens (gradient norms: over optimiser steps)."""
        norms = {f"grad_norm_{name}": sum(norms) / max(1, len(norms)) for name, norms in self.grad_norms.items()}
        late = self.last_epoch if self.last_epoch and self.last_epoch.tokens else self
        return (
            {name: self.mean(name) for name in self.sums if name != "total_loss"}
            | norms
            | {
                "clip_fraction_last_epoch": late.mean("clip_fraction"),
                "update_kl": self.update_kl,
                "ratio_max": self.ratio_max,
                "grad_clipped_share": self.grad_clipped / max(1, self.optimizer_steps),
                "optimizer_steps": float(self.optimizer_steps),
                "tokens_trained": self.tokens,
                "stopped_early": float(self.stopped_early),
            }
        )


@torch.no_grad()
def clip_fraction(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    clip_ratio: float,
    mask: Shaped[Tensor, "*shape"] | None = None,
    *,
    clip_ratio_high: float | None = None,
    ratio: RatioKind = "token",
) -> Float[Tensor, ""]:
    """Share of the real tokens that the clip leaves without a gradient: ρ above 1+ε_high where the advantage is
    positive, below 1−ε where it is negative."""
    gain = (policy_ratio(logprobs, old_logprobs, ratio, mask) - 1) * advantages.sign()
    clipped = torch.where(advantages > 0, gain > (clip_ratio_high or clip_ratio), gain > clip_ratio)
    return masked_mean(clipped.to(logprobs.dtype), mask)


@torch.no_grad()
def value_clip_fraction(
    values: Float[Tensor, "*shape"],
    old_values: Float[Tensor, "*shape"],
    clip_ratio: float,
    mask: Shaped[Tensor, "*shape"] | None = None,
) -> Float[Tensor, ""]:
    """Share of the real tokens whose value has moved by more than `clip_ratio` (units of the score)."""
    return masked_mean(((values - old_values).abs() > clip_ratio).to(values.dtype), mask)


@torch.no_grad()
def approx_kl(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    mask: Shaped[Tensor, "*shape"] | None = None,
) -> Float[Tensor, ""]:
    """KL(π_old ‖ π_θ) in nats per token, as mean(ρ − 1 − log ρ) over real tokens (rule 14's early stop)."""
    return masked_mean(estimate_kl(old_logprobs, logprobs, "k3", mask), mask)


@torch.no_grad()
def ratio_max(
    logprobs: Float[Tensor, "*shape"],
    old_logprobs: Float[Tensor, "*shape"],
    mask: Shaped[Tensor, "*shape"] | None = None,
) -> Float[Tensor, ""]:
    """Largest ρ = π_θ/π_old of the real tokens; 0 where there is none."""
    return zero_padding(torch.exp(logprobs - old_logprobs), mask).max()


@torch.no_grad()
def explained_variance(
    values: Float[Tensor, "*shape"],
    returns: Float[Tensor, "*shape"],
    mask: Shaped[Tensor, "*shape"] | None = None,
) -> Float[Tensor, ""]:
    """1 − Var(returns − values)/Var(returns) over the real tokens.

    1 is perfect, 0 as good as a constant, below 0 worse. For constant returns: 1 if the error is constant, too, else 0
    (scikit-learn's convention).
    """
    variance, unexplained = masked_var(returns, mask), masked_var(returns - values, mask)
    constant = (unexplained == 0).to(variance.dtype)
    return torch.where(variance > 0, 1 - unexplained / variance, constant)
