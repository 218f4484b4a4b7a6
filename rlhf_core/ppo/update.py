"""The update phase: K epochs of minibatches over one rollout, with gradients that do not depend on micro-batches."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import NonFiniteError, UserError
from rlhf_core.ppo.objective import Pass, Phase, Prices, losses_of
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
    skipped_minibatches: int = 0
    stopped_early: bool = False
    last_epoch: "UpdateStatistics | None" = None
    """The same of the last epoch alone."""
    grad_norms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, minibatch: "UpdateStatistics", opens_epoch: bool = False) -> None:
        """Count another minibatch in."""
        if opens_epoch:
            self.last_epoch = UpdateStatistics()
        if self.last_epoch is not None:
            self.last_epoch.add(minibatch)
        for name, total in minibatch.sums.items():
            self.sums[name] += total
        self.tokens += minibatch.tokens
        self.ratio_max = max(self.ratio_max, minibatch.ratio_max)

    def mean(self, name: str) -> float:
        """One statistic, over real tokens."""
        return self.sums[name] / self.tokens

    def means(self) -> dict[str, float]:
        """Every statistic of the update, as means over real tokens (gradient norms: over optimiser steps)."""
        result = {name: self.mean(name) for name in self.sums if name != "ratio"}
        result |= {
            f"grad_norm_{name}": sum(norms) / len(norms) if norms else 0.0 for name, norms in self.grad_norms.items()
        }
        late = self if self.last_epoch is None else self.last_epoch
        return result | {
            "clip_fraction_last_epoch": late.mean("clip_fraction"),
            "ratio_max": self.ratio_max,
            "optimizer_steps": float(self.optimizer_steps),
            "skipped_minibatches": float(self.skipped_minibatches),
            "stopped_early": float(self.stopped_early),
        }


@dataclass
class Updater:
    """Policy and critic with their optimisers; `run` trains them on one rollout."""

    policy: PreTrainedModel
    critic: PreTrainedModel
    reference: PreTrainedModel
    optimizers: dict[str, torch.optim.Optimizer]
    config: PPOConfig
    pad_id: int
    seed: int
    accelerator: Accelerator

    def run(self, rollout: Rollout, credit: Credit, step: int, prices: Prices) -> UpdateStatistics:
        """ppo_epochs × minibatches optimiser steps, no more; fewer only where `stop_kl` or `max_ratio` say so
        (rule 14)."""
        statistics = UpdateStatistics(grad_norms={name: [] for name in self.optimizers})
        phase = Phase.of(self.config, step)
        minibatches = self.config.minibatches if phase.ratio else 1
        for number, micro_batches in enumerate(self._minibatches(rollout, step)):
            found = self._accumulate(rollout, credit, micro_batches, phase, prices, check_ratio=number == 0)
            statistics.add(found, opens_epoch=number % minibatches == 0)
            if self._too_far(found):
                statistics.stopped_early = True
                self._drop_gradients()
                break
            if self._explodes(found):
                statistics.skipped_minibatches += 1
                self._drop_gradients()
                continue
            self._step_optimizers(statistics, step)
        return statistics

    def plan(self, rollout: Rollout, step: int, epoch: int) -> list[list[list[int]]]:
        """Minibatches of micro-batches of rows for one epoch."""
        minibatches = self.config.minibatches if Phase.of(self.config, step).ratio else 1
        return minibatches_of_epoch(rollout.lengths, minibatches, self.config.micro_batch_size, self.seed, step, epoch)

    def _minibatches(self, rollout: Rollout, step: int) -> Iterator[list[list[int]]]:
        epochs = self.config.ppo_epochs if Phase.of(self.config, step).ratio else 1
        for epoch in range(epochs):
            yield from self.plan(rollout, step, epoch)

    def _accumulate(
        self,
        rollout: Rollout,
        credit: Credit,
        micro_batches: Sequence[Sequence[int]],
        phase: Phase,
        prices: Prices,
        check_ratio: bool,
    ) -> UpdateStatistics:
        """Add up the gradient of one minibatch: Σ over its real tokens / number of its real tokens (rule 13)."""
        statistics = UpdateStatistics(tokens=sum(len(rollout.response_ids[i]) for rows in micro_batches for i in rows))
        for rows in micro_batches:
            forward = Pass.over(rows, rollout, credit, self.policy, self.critic, self.config.temperature, self.pad_id)
            if check_ratio and self.config.check_ratio:
                require_same_policy(forward.logprobs, forward.old_logprobs, forward.batch.mask)
            losses = losses_of(forward, self.config, phase, prices, self.reference)
            loss = losses["total_loss"] / statistics.tokens
            if not torch.isfinite(loss):
                raise NonFiniteError(f"the loss is {loss.item()}; lower the learning rate or clip the score")
            self.accelerator.backward(loss)
            self._record(statistics, losses, forward)
        return statistics

    @torch.no_grad()
    def _record(self, statistics: UpdateStatistics, losses: dict[str, Tensor], forward: Pass) -> None:
        real = forward.batch.mask.bool()
        log_ratio = (forward.logprobs - forward.old_logprobs)[real]
        ratio = log_ratio.exp()
        value_change = (forward.values - forward.old_values)[real].abs()
        for name, loss in losses.items():
            if name != "total_loss":
                statistics.sums[name] += loss.item()
        statistics.sums["clip_fraction"] += ((ratio - 1).abs() > self.config.clip_ratio).sum().item()
        statistics.sums["value_clip_fraction"] += (value_change > self.config.critic.value_clip).sum().item()
        statistics.sums["approx_kl"] += (ratio - 1 - log_ratio).sum().item()
        statistics.sums["ratio"] += ratio.sum().item()
        statistics.ratio_max = max(statistics.ratio_max, ratio.max().item())

    def _too_far(self, minibatch: UpdateStatistics) -> bool:
        limit = self.config.stop_kl
        return limit is not None and minibatch.mean("approx_kl") > limit

    def _explodes(self, minibatch: UpdateStatistics) -> bool:
        limit = self.config.max_ratio
        return limit is not None and not minibatch.mean("ratio") <= limit

    def _drop_gradients(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

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
        self._drop_gradients()
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
