"""The update phase: epochs of minibatches over one rollout; gradients do not depend on the micro-batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.determinism import strict_kernels
from rlhf_core.errors import NonFiniteError, UserError, is_out_of_memory
from rlhf_core.models.batching import micro_batches, packed_batches
from rlhf_core.models.head import Predictions
from rlhf_core.models.masked import masked_mean, zero_padding
from rlhf_core.models.packed import can_pack
from rlhf_core.models.sharding import clip_gradients
from rlhf_core.models.token_logprobs import Compared, compare_distributions, logprobs_and_entropy
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.kl import estimate_kl
from rlhf_core.ppo.objective import Pass, losses_of
from rlhf_core.ppo.optimizers import Optimizers
from rlhf_core.ppo.plan import StepPlan, minibatches_of_epoch
from rlhf_core.ppo.ptx import TextMix
from rlhf_core.ppo.rollout import Credit, Rollout
from rlhf_core.ppo.statistics import UpdateStatistics, approx_kl, clip_fraction, ratio_max, value_clip_fraction
from rlhf_core.training.memory import Halving, OutOfMemory, attempt
from rlhf_core.training.processes import Processes

FIRST_RATIO_TOLERANCE = 1e-4
"""Largest |log π_θ − log π_old| at the first minibatch, float32 (rule 7)."""
BFLOAT16_TOLERANCE = 1e-2
"""The same in the mean, for bfloat16."""

Problem = UserError | OutOfMemory
"""Errors that are raised in every process when one of them has one."""
Result = TypeVar("Result")


class Watcher(Protocol):
    """Called after each pass of an update; changes nothing."""

    def __call__(self, number: int, rows: Sequence[int], forward: Pass, losses: dict[str, Tensor]) -> None:
        """A pass over some rows of minibatch `number` (counted from 0 over all epochs of the step), with its losses
        summed over real tokens. A minibatch that did not fit into memory is repeated in smaller parts."""


class RatioError(UserError):
    """π_θ differs from π_old before any update: sampling and training do not use the same model."""


PROBLEMS = (NonFiniteError, RatioError, OutOfMemory)


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

    def run(self, rollout: Rollout, credit: Credit, plan: StepPlan) -> UpdateStatistics:
        """Epochs × minibatches optimiser steps, no more; fewer only by `stop_kl` or `max_ratio` (rule 14)."""
        statistics = UpdateStatistics(grad_norms={name: [] for name in self.optimizers})
        minibatches = (rows for epoch in range(plan.epochs) for rows in self._minibatches(rollout, plan, epoch))
        with self.models.training():
            for number, minibatch in enumerate(minibatches):
                if number % plan.minibatches == 0:
                    statistics.last_epoch = UpdateStatistics()
                found = self._gradient(rollout, credit, minibatch, plan, number)
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
                self._step_optimizers(statistics, plan)
        if statistics.tokens == 0:
            raise NonFiniteError("no minibatch has a finite loss; lower the learning rate")
        if plan.trains_policy:
            statistics.update_kl = self.measure_kl(rollout, plan)
        return statistics

    def passes(self, rollout: Rollout, plan: StepPlan, epoch: int) -> list[list[list[int]]]:
        """Minibatches of micro-batches of rows for one epoch."""
        return [self._micro_batches(rollout, rows, plan) for rows in self._minibatches(rollout, plan, epoch)]

    @torch.no_grad()
    def read(self, rollout: Rollout, plan: StepPlan) -> None:
        """Fill in π_old, π_ref and V, in the micro-batches of epoch 0, so that the first ratio is 1 (rule 7)."""
        tables = (rollout.old_logprobs, rollout.ref_logprobs, rollout.ref_kl, rollout.old_values)

        def work() -> None:
            for table in tables:
                table.zero_()
            for minibatch in self.passes(rollout, plan, 0):
                for rows, counts in self.processes.share_evenly(minibatch):
                    self._try(partial(self._read_rows, rollout, rows, tables if counts else ()), rows)

        self.halving.until_it_fits(work, gather=self.processes.gather)
        self.processes.all_reduce(tables)

    @torch.no_grad()
    def measure_kl(self, rollout: Rollout, plan: StepPlan) -> float:
        """KL(π_old ‖ π_θ) of the policy as it is now, in nats per token of the rollout (rule 22)."""
        total = torch.zeros((), dtype=torch.float64, device=self.processes.device)

        def work(rows: list[int], counts: bool) -> None:
            batch = rollout.batch(rows, self.pad_id)
            read = partial(logprobs_and_entropy, actions=batch.response_tokens, temperature=self.config.temperature)
            logprobs, _ = self.models.read_policy(batch, read)
            old = rollout.old_logprobs[rows, : batch.time][batch.real]
            if counts:
                total.add_(estimate_kl(old, logprobs, "k3").sum())

        def passes() -> None:
            total.zero_()
            for minibatch in self.passes(rollout, plan, 0):
                for rows, counts in self.processes.share_evenly(minibatch):
                    self._try(partial(work, rows, counts), rows)

        self.halving.until_it_fits(passes, gather=self.processes.gather)
        self.processes.all_reduce([total])
        return total.item() / sum(rollout.lengths)

    def _read_rows(self, rollout: Rollout, rows: list[int], tables: Sequence[Tensor]) -> None:
        batch = rollout.batch(rows, self.pad_id)

        def compared(predictions: Predictions) -> Compared:
            compare = partial(
                compare_distributions, predictions, actions=batch.response_tokens, temperature=self.config.temperature
            )
            return self.models.read_reference(batch, compare)

        found, values = self.models.read(batch, compared)
        parts = map(batch.spread, (found.logprobs, found.ref_logprobs, found.kl))
        for table, part in zip(tables, (*parts, zero_padding(values, batch.mask)), strict=True):
            table[rows, : batch.time] = part

    def _try(self, work: Callable[[], Result], rows: Sequence[int]) -> Result:
        """`work`, a pass over these rows; where models are divided, its error is raised in every process."""
        return self.processes.together(partial(attempt, work, partial(len, rows)), PROBLEMS)

    def _minibatches(self, rollout: Rollout, plan: StepPlan, epoch: int) -> list[list[int]]:
        return minibatches_of_epoch(len(rollout.response_ids), plan.minibatches, self.seed, plan.step, epoch)

    def _micro_batches(self, rollout: Rollout, minibatch: Sequence[int], plan: StepPlan) -> list[list[int]]:
        """Micro-batches of a minibatch, halved after a lack of memory."""
        config, responses = self.config, len(rollout.response_ids)
        share = -(-responses // plan.minibatches // self.processes.count)
        rows = self.halving.of(min(config.micro_batch_size, max(1, share)))
        tokens = config.micro_batch_tokens and self.halving.of(config.micro_batch_tokens)
        if can_pack(self.models.policy):
            return packed_batches(minibatch, rollout.sequences, rows, tokens)
        return micro_batches(minibatch, rollout.widths, rows, tokens)

    def _gradient(
        self, rollout: Rollout, credit: Credit, minibatch: Sequence[int], plan: StepPlan, number: int
    ) -> UpdateStatistics:
        """Add up the gradient of a minibatch, with that of the text unless the minibatch is skipped. Raises UserError
        when half a micro-batch does not fit.

        A failed micro-batch may have added a part of its gradient: the whole minibatch is repeated in halves. For the
        first minibatch log π_old is computed in halves again, too, so that its ratio stays 1 (rule 7).
        """
        begun = self.halving.done

        def work() -> UpdateStatistics:
            if number == 0 and self.halving.done and not begun:
                self.read(rollout, plan)
            micro = self._micro_batches(rollout, minibatch, plan)
            found = self._accumulate(rollout, credit, micro, plan, number)
            if self.text is not None and plan.trains_policy and not self._too_far(found) and not self._explodes(found):
                found.text_losses.append(self._mix_text(self.text, plan.step, number))
            return found

        return self.halving.until_it_fits(work, self._drop_gradients)

    def _accumulate(
        self,
        rollout: Rollout,
        credit: Credit,
        minibatch: Sequence[Sequence[int]],
        plan: StepPlan,
        number: int,
    ) -> UpdateStatistics:
        """Add up the gradient of one minibatch: Σ over its real tokens / number of its real tokens (or as
        `loss_average` says), over its micro-batches and all processes (rule 13). The gradients themselves are added up
        at the optimiser's step."""
        lengths = [len(rollout.response_ids[i]) for rows in minibatch for i in rows]
        statistics, mean_length = UpdateStatistics(tokens=sum(lengths)), sum(lengths) / len(lengths)

        def forward_pass(rows: Sequence[int]) -> tuple[Pass, dict[str, Tensor], Tensor]:
            forward = Pass.over(
                rows, rollout, credit, self.models, self.config, self.pad_id, plan.trains_policy, mean_length
            )
            if number == 0 and self.config.check_ratio:
                self._require_same_policy(forward)
            losses = losses_of(forward, self.config, plan, self.models)
            return forward, losses, finite(losses["total_loss"] / statistics.tokens)

        def one_pass(rows: Sequence[int], counts: bool) -> None:
            forward, losses, loss = self._try(partial(forward_pass, rows), rows)
            self._backward(loss if counts else 0 * loss)
            if counts:
                self._record(statistics, losses, forward)
            if counts and self.watch is not None:
                self.watch(number, rows, forward, losses)

        problem: Problem | None = None
        try:
            for rows, counts in self.processes.share_evenly(minibatch):
                attempt(partial(one_pass, rows, counts), partial(len, rows))
        except PROBLEMS as error:
            problem = error
        statistics.exploded = self._agree(problem)
        statistics.all_reduce(self.processes)
        return statistics

    def _require_same_policy(self, forward: Pass) -> None:
        try:
            require_same_policy(forward.logprobs, forward.old_logprobs, forward.batch.mask, self.models.precision)
        except RatioError:
            if torch.isfinite(forward.logprobs).all():
                raise
            raise NonFiniteError("the policy's log-probabilities are not finite; lower the learning rate") from None

    def _agree(self, problem: Problem | None) -> bool:
        """Raise the error of any process in all of them; return True instead for a loss that is not finite, where
        `max_ratio` skips such minibatches."""
        problems = [met for met in self.processes.gather([problem]) if met is not None]
        for met in problems:
            if self.config.max_ratio is None or not isinstance(met, NonFiniteError):
                raise met
        return bool(problems)

    def _backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss. Raises UserError for an operation without a deterministic kernel, and where
        memory is short and models are divided: the other processes wait for this one's part of the gradients, and
        cannot repeat the pass."""
        try:
            with strict_kernels():
                loss.backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, MemoryError) as error:
            if not (self.processes.divides_models and is_out_of_memory(error)):
                raise
            raise UserError(
                f"out of memory in a backward pass with ppo.sharding: fsdp; lower {self.halving.keys}; "
                "the last checkpoint is kept"
            ) from None

    def _mix_text(self, text: TextMix, step: int, minibatch: int) -> float:
        """Add the gradient of the text; returns its loss, nats per token. Raises the error of any process in all."""
        total = torch.zeros((), device=self.processes.device)
        rows = self.halving.of(min(text.micro_batch_size, text.batch_size))

        losses = text.losses(self.models, step, minibatch, self.processes, rows)

        def next_loss() -> Tensor | None:
            loss = next(losses, None)
            return None if loss is None else finite(loss)

        def passes() -> None:
            while (loss := self._try(next_loss, range(rows))) is not None:
                self._backward(text.coef * loss)
                total.add_(loss.detach())

        problem: Problem | None = None
        try:
            attempt(passes, lambda: rows)
        except PROBLEMS as error:
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
            "clip_fraction": clip_fraction(new, old, forward.advantages, self.config.clip_ratio, mask),
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

    def _step_optimizers(self, statistics: UpdateStatistics, plan: StepPlan) -> None:
        """Sum the gradients over the processes, clip each model's by its global norm (rule 16), and step the optimisers
        (not the policy's while only the critic is trained)."""
        for name, parameters in self.models.trained().items():
            if name == "policy" and not plan.trains_policy:
                statistics.grad_norms[name].append(0.0)
                continue
            self._all_reduce_gradients(parameters)
            norm = clip_gradients(parameters, self.config.optimizer.max_grad_norm)
            if not math.isfinite(norm):
                raise NonFiniteError(f"the gradient norm of the {name} is {norm}; lower the learning rate")
            statistics.grad_norms[name].append(norm)
            statistics.grad_clipped += name == "policy" and norm > self.config.optimizer.max_grad_norm
        for name, optimizer in self.optimizers.items():
            if name != "policy" or plan.trains_policy:
                optimizer.step()
        self._drop_gradients()
        statistics.optimizer_steps += 1

    def _all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        if self.processes.count == 1:
            return
        whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        for parameter in whole:
            if parameter.grad is None:  # this process had no micro-batch of this minibatch
                parameter.grad = torch.zeros_like(parameter)
        self.processes.all_reduce([parameter.grad for parameter in whole if parameter.grad is not None])


def finite(loss: Tensor) -> Tensor:
    """The loss. Raises NonFiniteError for NaN or infinity."""
    if not torch.isfinite(loss):
        raise NonFiniteError(f"the loss is {loss.item()}; lower the learning rate or clip the score")
    return loss


def require_same_policy(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, precision: Precision = "float32") -> None:
    """Raise RatioError unless both agree on the real tokens, as they must before the first update (rule 7): on every
    token in float32, in the mean in bfloat16."""
    gaps = (logprobs - old_logprobs)[mask.bool()].abs()
    gap, allowed = (gaps.max(), FIRST_RATIO_TOLERANCE) if precision == "float32" else (gaps.mean(), BFLOAT16_TOLERANCE)
    if not gap <= allowed:
        raise RatioError(
            f"before the first update |log π_θ − log π_old| is {gap:.2e}, allowed is {allowed:g}: "
            "dropout, precision or padding differ between rollout and update; use float32 and no dropout"
        )
