"""The update phase: K epochs of minibatches over one rollout, with gradients that do not depend on micro-batches."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.batch import response_logits, state_values
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import NonFiniteError, UserError
from rlhf_core.ppo.losses import compute_ppo_total_loss, logprobs_and_entropy
from rlhf_core.ppo.plan import minibatches_of_epoch
from rlhf_core.ppo.rollout import Credit, Rollout

FIRST_RATIO_TOLERANCE = 1e-4
"""Largest |log π_θ − log π_old| at the first minibatch, float32 (rule 7)."""


class RatioError(UserError):
    """π_θ differs from π_old before any update: sampling and training do not see the same model."""


@dataclass
class UpdateStatistics:
    """Sums over real tokens of all minibatches; `means` turns them into masked means."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tokens: float = 0.0
    ratio_max: float = 0.0
    optimizer_steps: int = 0
    grad_norms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def means(self) -> dict[str, float]:
        """Every statistic of the update, as means over real tokens (gradient norms: over optimiser steps)."""
        result = {name: total / self.tokens for name, total in self.sums.items()}
        result |= {f"grad_norm_{name}": sum(norms) / len(norms) for name, norms in self.grad_norms.items()}
        return result | {"ratio_max": self.ratio_max, "optimizer_steps": float(self.optimizer_steps)}


@dataclass
class Updater:
    """Policy and critic with their optimisers; `run` trains them on one rollout."""

    policy: PreTrainedModel
    critic: PreTrainedModel
    optimizers: dict[str, torch.optim.Optimizer]
    config: PPOConfig
    pad_id: int
    seed: int
    accelerator: Accelerator

    def run(self, rollout: Rollout, credit: Credit, step: int) -> UpdateStatistics:
        """ppo_epochs × minibatches optimiser steps, no more and no fewer (rule 14)."""
        statistics = UpdateStatistics()
        for epoch in range(self.config.ppo_epochs):
            for micro_batches in self.plan(rollout, step, epoch):
                first = statistics.optimizer_steps == 0
                self._accumulate(rollout, credit, micro_batches, statistics, check_ratio=first)
                self._step_optimizers(statistics, step)
        return statistics

    def plan(self, rollout: Rollout, step: int, epoch: int) -> list[list[list[int]]]:
        """Minibatches of micro-batches of rows for one epoch."""
        return minibatches_of_epoch(
            rollout.lengths, self.config.minibatches, self.config.micro_batch_size, self.seed, step, epoch
        )

    def _accumulate(
        self,
        rollout: Rollout,
        credit: Credit,
        micro_batches: Sequence[Sequence[int]],
        statistics: UpdateStatistics,
        check_ratio: bool,
    ) -> None:
        """Add up the gradient of one minibatch: Σ over its real tokens / number of its real tokens (rule 13)."""
        tokens = sum(len(rollout.response_ids[i]) for rows in micro_batches for i in rows)
        for rows in micro_batches:
            losses = self._micro_batch_loss(rollout, credit, rows, statistics, check_ratio)
            loss = losses["total_loss"] / tokens
            if not torch.isfinite(loss):
                raise NonFiniteError(f"the loss is {loss.item()}; lower the learning rate or clip the score")
            self.accelerator.backward(loss)
        statistics.tokens += tokens

    def _micro_batch_loss(
        self, rollout: Rollout, credit: Credit, rows: Sequence[int], statistics: UpdateStatistics, check_ratio: bool
    ) -> dict[str, Tensor]:
        """Losses summed over the real tokens of the rows."""
        config, batch = self.config, rollout.batch(rows, self.pad_id)
        old_logprobs, old_values, advantages, returns = (
            x[rows, : batch.time] for x in (rollout.old_logprobs, rollout.old_values, credit.weights, credit.returns)
        )
        logprobs, entropy = logprobs_and_entropy(
            response_logits(self.policy, batch), batch.actions, config.temperature, batch.mask
        )
        values = state_values(self.critic, batch)
        if check_ratio and config.check_ratio:
            require_same_policy(logprobs, old_logprobs, batch.mask)
        losses = compute_ppo_total_loss(
            logprobs,
            old_logprobs,
            advantages,
            values,
            returns,
            logits=None,
            entropy=entropy,
            clip_ratio=config.clip_ratio,
            vf_coef=config.vf_coef,
            entropy_coef=config.entropy_coef,
            old_values=old_values,
            clip_value=config.critic.clip_value,
            value_clip_ratio=config.critic.value_clip,
            mask=batch.mask,
            reduction="sum",
        )
        self._record(statistics, losses, logprobs, old_logprobs, values, old_values, batch.mask)
        return losses

    @torch.no_grad()
    def _record(
        self,
        statistics: UpdateStatistics,
        losses: dict[str, Tensor],
        logprobs: Tensor,
        old_logprobs: Tensor,
        values: Tensor,
        old_values: Tensor,
        mask: Tensor,
    ) -> None:
        real = mask.bool()
        log_ratio = (logprobs - old_logprobs)[real]
        ratio = log_ratio.exp()
        value_change = (values - old_values)[real].abs()
        for name in ("policy_loss", "value_loss", "entropy"):
            statistics.sums[name] += losses[name].item()
        statistics.sums["clip_fraction"] += ((ratio - 1).abs() > self.config.clip_ratio).sum().item()
        statistics.sums["value_clip_fraction"] += (value_change > self.config.critic.value_clip).sum().item()
        statistics.sums["approx_kl"] += (ratio - 1 - log_ratio).sum().item()
        statistics.ratio_max = max(statistics.ratio_max, ratio.max().item())

    def _step_optimizers(self, statistics: UpdateStatistics, step: int) -> None:
        """Clip each model's gradient by its global norm (rule 16) and make one optimiser step of each."""
        for name, model in (("policy", self.policy), ("critic", self.critic)):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.config.optimizer.max_grad_norm).item()
            if not math.isfinite(norm):
                raise NonFiniteError(
                    f"step {step + 1}: the gradient norm of the {name} is {norm}; lower the learning rate"
                )
            statistics.grad_norms[name].append(norm)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        statistics.optimizer_steps += 1


def require_same_policy(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> None:
    """Raise RatioError unless both agree on every real token, as they must before the first update (rule 7)."""
    worst = (logprobs - old_logprobs)[mask.bool()].abs().max().item()
    if not worst <= FIRST_RATIO_TOLERANCE:
        raise RatioError(
            f"before the first update |log π_θ − log π_old| is {worst:.2e}, allowed is {FIRST_RATIO_TOLERANCE:g}: "
            "dropout, precision or padding differ between rollout and update; use float32 and no dropout"
        )


def every_row(plan: Sequence[Sequence[Sequence[int]]]) -> Iterator[Sequence[int]]:
    """All micro-batches of an epoch."""
    for minibatch in plan:
        yield from minibatch
