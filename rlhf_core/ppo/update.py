"""The update phase: K epochs of minibatches over one rollout, with gradients that do not depend on micro-batches."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.errors import NonFiniteError, UserError
from rlhf_core.models.batching import micro_batches
from rlhf_core.models.masked import masked_mean, zero_padding
from rlhf_core.models.token_logprobs import compare_logprobs
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.losses import approx_kl, clip_fraction, ratio_max, value_clip_fraction
from rlhf_core.ppo.objective import Pass, Phase, Prices, losses_of
from rlhf_core.ppo.optimizers import Optimizers
from rlhf_core.ppo.plan import minibatches_of_epoch
from rlhf_core.ppo.processes import Processes
from rlhf_core.ppo.ptx import TextMix
from rlhf_core.ppo.rollout import Credit, Rollout
from rlhf_core.training.memory import Halving, OutOfMemory, attempt

FIRST_RATIO_TOLERANCE = 1e-4
"""Largest |log π_θ − log π_old| at the first minibatch, float32 (rule 7)."""
BFLOAT16_TOLERANCE = 1e-2
"""The same in the mean, for bfloat16."""

Problem = UserError | OutOfMemory
"""What one process meets and all have to know."""


class Watcher(Protocol):
    """Looks on while the update runs, and changes nothing."""

    def __call__(self, number: int, rows: Sequence[int], forward: Pass, losses: dict[str, Tensor]) -> None:
        """A pass over some rows of minibatch `number` (counted from 0 over all epochs of the step), with its losses
        summed over real tokens. A minibatch that did not fit into memory comes again, in smaller parts."""


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
    exploded: bool = False
    """A minibatch whose loss is not finite, and that `max_ratio` skips."""
    last_epoch: "UpdateStatistics | None" = None
    """The same of the last epoch that was begun, alone."""
    grad_norms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    text_losses: list[float] = field(default_factory=list)

    def add_up(self, processes: Processes) -> None:
        """Sum over the processes; `tokens` is the minibatch's already."""
        if processes.count == 1:
            return
        names = sorted(set().union(*processes.gather([list(self.sums)])))
        sums = torch.tensor([self.sums[name] for name in names], dtype=torch.float64, device=processes.device)
        processes.add_up([sums])
        self.sums.update(zip(names, sums.tolist(), strict=True))
        self.ratio_max = max(processes.gather([self.ratio_max]))

    def add(self, minibatch: "UpdateStatistics") -> None:
        """Count another minibatch in."""
        self.text_losses += minibatch.text_losses
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
        if self.text_losses:
            result["ptx_loss"] = sum(self.text_losses) / len(self.text_losses)
        late = self.last_epoch if self.last_epoch and self.last_epoch.tokens else self
        return result | {
            "clip_fraction_last_epoch": late.mean("clip_fraction"),
            "ratio_max": self.ratio_max,
            "optimizer_steps": float(self.optimizer_steps),
            "tokens_trained": self.tokens,
            "skipped_minibatches": float(self.skipped_minibatches),
            "stopped_early": float(self.stopped_early),
        }


@dataclass
class Updater:
    """The models with their optimisers; `run` trains them on one rollout."""

    models: ActorCritic
    optimizers: Optimizers
    config: PPOConfig
    pad_id: int
    seed: int
    processes: Processes
    halving: Halving
    text: TextMix | None = None
    watch: Watcher | None = None

    def run(self, rollout: Rollout, credit: Credit, step: int, prices: Prices) -> UpdateStatistics:
        """ppo_epochs × minibatches optimiser steps, no more; fewer only where `stop_kl` or `max_ratio` say so
        (rule 14)."""
        statistics = UpdateStatistics(grad_norms={name: [] for name in self.optimizers})
        phase = Phase.of(self.config, step)
        with self.models.training():
            for number, (first, minibatch) in enumerate(self._minibatches(rollout, step)):
                if first:
                    statistics.last_epoch = UpdateStatistics()
                found = self._gradient(rollout, credit, minibatch, step, number, prices)
                if not found.exploded:
                    statistics.add(found)
                if self._too_far(found):
                    statistics.stopped_early = True
                    self._drop_gradients()
                    break
                if self._explodes(found):
                    statistics.skipped_minibatches += 1
                    self._drop_gradients()
                    continue
                self._step_optimizers(statistics, phase)
        if statistics.tokens == 0:
            raise NonFiniteError("no minibatch has a finite loss; lower the learning rate")
        return statistics

    def plan(self, rollout: Rollout, step: int, epoch: int) -> list[list[list[int]]]:
        """Minibatches of micro-batches of rows for one epoch."""
        return [self._micro_batches(rollout, minibatch, step) for minibatch in self._epoch(rollout, step, epoch)]

    @torch.no_grad()
    def read(self, rollout: Rollout, step: int) -> None:
        """Fill in π_old, π_ref and V, in the micro-batches of epoch 0, so that the first ratio is 1 (rule 7)."""
        tables = (rollout.old_logprobs, rollout.ref_logprobs, rollout.ref_kl, rollout.old_values)

        def work() -> None:
            for table in tables:
                table.zero_()
            for minibatch in self.plan(rollout, step, 0):
                for rows in self.processes.share(minibatch):
                    attempt(partial(self._read_rows, rollout, rows, tables), partial(len, rows))

        self.halving.until_it_fits(work, gather=self.processes.gather)
        self.processes.add_up(tables)

    def _read_rows(self, rollout: Rollout, rows: list[int], tables: Sequence[Tensor]) -> None:
        batch = rollout.batch(rows, self.pad_id)
        logits, values = self.models.forward(batch)
        found = compare_logprobs(
            logits, self.models.reference_logits(batch), batch.actions, self.config.temperature, batch.mask
        )
        for table, part in zip(tables, (*found, zero_padding(values, batch.mask)), strict=True):
            table[rows, : batch.time] = part

    def _minibatches(self, rollout: Rollout, step: int) -> Iterator[tuple[bool, list[int]]]:
        """The rows of each minibatch, and whether it is the first of its epoch."""
        for epoch in range(Phase.of(self.config, step).epochs(self.config)):
            for place, minibatch in enumerate(self._epoch(rollout, step, epoch)):
                yield place == 0, minibatch

    def _epoch(self, rollout: Rollout, step: int, epoch: int) -> list[list[int]]:
        minibatches = Phase.of(self.config, step).minibatches(self.config)
        return minibatches_of_epoch(len(rollout.response_ids), minibatches, self.seed, step, epoch)

    def _micro_batches(self, rollout: Rollout, minibatch: Sequence[int], step: int) -> list[list[int]]:
        """As large as the settings and the memory allow."""
        config, responses = self.config, len(rollout.response_ids)
        share = -(-responses // Phase.of(config, step).minibatches(config) // self.processes.count)
        rows = self.halving.of(min(config.micro_batch_size, max(1, share)))
        tokens = config.micro_batch_tokens and self.halving.of(config.micro_batch_tokens)
        return micro_batches(minibatch, rollout.widths, rows, tokens)

    def _gradient(
        self, rollout: Rollout, credit: Credit, minibatch: Sequence[int], step: int, number: int, prices: Prices
    ) -> UpdateStatistics:
        """Add up the gradient of a minibatch, the text in it unless it is to be skipped. Raises UserError when half a
        micro-batch does not fit.

        When a micro-batch fails, some of its gradient may have been added already: the whole minibatch is dropped and
        computed again in halves, and what the first one is compared with (rule 7) is read again like that, too.
        """
        phase, begun = Phase.of(self.config, step), self.halving.done

        def work() -> UpdateStatistics:
            if number == 0 and self.halving.done and not begun:
                self.read(rollout, step)
            micro = self._micro_batches(rollout, minibatch, step)
            found = self._accumulate(rollout, credit, micro, phase, prices, number)
            if self.text is not None and phase.policy and not self._too_far(found) and not self._explodes(found):
                found.text_losses.append(self._mix_text(self.text, step, number))
            return found

        return self.halving.until_it_fits(work, self._drop_gradients)

    def _accumulate(
        self,
        rollout: Rollout,
        credit: Credit,
        minibatch: Sequence[Sequence[int]],
        phase: Phase,
        prices: Prices,
        number: int,
    ) -> UpdateStatistics:
        """Add up the gradient of one minibatch: Σ over its real tokens / number of its real tokens, over its
        micro-batches and all processes (rule 13). The gradients themselves are added up at the optimiser's step."""
        statistics = UpdateStatistics(tokens=sum(len(rollout.response_ids[i]) for rows in minibatch for i in rows))

        def one_pass(rows: Sequence[int]) -> None:
            forward = Pass.over(rows, rollout, credit, self.models, self.config.temperature, self.pad_id)
            if number == 0 and self.config.check_ratio:
                self._require_same_policy(forward)
            losses = losses_of(forward, self.config, phase, prices, self.models)
            self._backward(losses["total_loss"] / statistics.tokens)
            self._record(statistics, losses, forward)
            if self.watch is not None:
                self.watch(number, rows, forward, losses)

        problem: Problem | None = None
        try:
            for rows in self.processes.share(minibatch):
                attempt(partial(one_pass, rows), partial(len, rows))
        except (NonFiniteError, RatioError, OutOfMemory) as error:
            problem = error
        statistics.exploded = self._agree(problem)
        statistics.add_up(self.processes)
        return statistics

    def _require_same_policy(self, forward: Pass) -> None:
        try:
            require_same_policy(forward.logprobs, forward.old_logprobs, forward.batch.mask, self.config.precision)
        except RatioError:
            if torch.isfinite(forward.logprobs).all():
                raise
            raise NonFiniteError("the policy's log-probabilities are not finite; lower the learning rate") from None

    def _agree(self, problem: Problem | None) -> bool:
        """Raise in every process what one of them met; a loss that is not finite is only told where `max_ratio` skips
        such minibatches."""
        problems = [met for met in self.processes.gather([problem]) if met is not None]
        for met in problems:
            if self.config.max_ratio is None or not isinstance(met, NonFiniteError):
                raise met
        return bool(problems)

    def _backward(self, loss: Tensor) -> None:
        if not torch.isfinite(loss):
            raise NonFiniteError(f"the loss is {loss.item()}; lower the learning rate or clip the score")
        loss.backward()  # type: ignore[no-untyped-call]

    def _mix_text(self, text: TextMix, step: int, minibatch: int) -> float:
        """Add the gradient of the text; returns its loss, nats per token. Raises in every process what one met."""
        total = torch.zeros((), device=self.processes.device)
        rows = self.halving.of(min(text.micro_batch_size, text.batch_size))

        def passes() -> None:
            for loss in text.losses(self.models, step, minibatch, self.processes, rows):
                self._backward(text.coef * loss)
                total.add_(loss.detach())

        problem: Problem | None = None
        try:
            attempt(passes, lambda: rows)
        except (NonFiniteError, OutOfMemory) as error:
            problem = error
        met = self.processes.gather([(problem, total.item())])
        for found, _ in met:
            if found is not None:
                raise found
        return torch.tensor([loss for _, loss in met]).sum().item()

    @torch.no_grad()
    def _record(self, statistics: UpdateStatistics, losses: dict[str, Tensor], forward: Pass) -> None:
        mask, new, old = forward.batch.mask, forward.logprobs, forward.old_logprobs
        means = {
            "clip_fraction": clip_fraction(new, old, self.config.clip_ratio, mask),
            "value_clip_fraction": value_clip_fraction(
                forward.values, forward.old_values, self.config.critic.value_clip, mask
            ),
            "approx_kl": approx_kl(new, old, mask),
            "ratio": masked_mean(torch.exp(new - old), mask),
        }
        real = mask.sum().item()
        for name, loss in losses.items():
            if name != "total_loss":
                statistics.sums[name] += loss.item()
        for name, mean in means.items():
            statistics.sums[name] += mean.item() * real
        statistics.ratio_max = max(statistics.ratio_max, ratio_max(new, old, mask).item())

    def _too_far(self, minibatch: UpdateStatistics) -> bool:
        limit = self.config.stop_kl
        return limit is not None and not minibatch.exploded and minibatch.mean("approx_kl") > limit

    def _explodes(self, minibatch: UpdateStatistics) -> bool:
        limit = self.config.max_ratio
        return minibatch.exploded or (limit is not None and not minibatch.mean("ratio") <= limit)

    def _drop_gradients(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def _step_optimizers(self, statistics: UpdateStatistics, phase: Phase) -> None:
        """Add up the processes' gradients, clip each model's by its global norm (rule 16), and step each optimiser; the
        policy's stands still while only the critic learns."""
        for name, parameters in self.models.trained().items():
            if name == "policy" and not phase.policy:
                statistics.grad_norms[name].append(0.0)
                continue
            self._add_up_gradients(parameters)
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.optimizer.max_grad_norm).item()
            if not math.isfinite(norm):
                raise NonFiniteError(f"the gradient norm of the {name} is {norm}; lower the learning rate")
            statistics.grad_norms[name].append(norm)
        for name, optimizer in self.optimizers.items():
            if name != "policy" or phase.policy:
                optimizer.step()
        self._drop_gradients()
        statistics.optimizer_steps += 1

    def _add_up_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        if self.processes.count == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:  # this process had no micro-batch of this minibatch
                parameter.grad = torch.zeros_like(parameter)
        self.processes.add_up([parameter.grad for parameter in parameters if parameter.grad is not None])


def require_same_policy(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, precision: str = "float32") -> None:
    """Raise RatioError unless both agree on the real tokens, as they must before the first update (rule 7): on every
    token in float32, in the mean in bfloat16."""
    gaps = (logprobs - old_logprobs)[mask.bool()].abs()
    gap, allowed = (gaps.max(), FIRST_RATIO_TOLERANCE) if precision == "float32" else (gaps.mean(), BFLOAT16_TOLERANCE)
    if not gap <= allowed:
        raise RatioError(
            f"before the first update |log π_θ − log π_old| is {gap:.2e}, allowed is {allowed:g}: "
            "dropout, precision or padding differ between rollout and update; use float32 and no dropout"
        )
