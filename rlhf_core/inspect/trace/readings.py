"""Losses and statistics of single tokens, from the functions of PPO's loss."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.inspect.trace.records import Reading
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.token_logprobs import exact_kl
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.losses import compute_value_loss
from rlhf_core.ppo.objective import Pass, kl_loss, policy_loss
from rlhf_core.ppo.plan import StepPlan
from rlhf_core.ppo.rollout import Rollout
from rlhf_core.ppo.statistics import value_clip_fraction


class PassRecorder:
    """Records the losses of each minibatch, summed, and the passes over the traced rows."""

    def __init__(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.traced, self.lengths = frozenset(rows), lengths
        self.seen: dict[int, list[int]] = {}
        self.sums: dict[int, dict[str, float]] = {}
        self.passes: dict[int, dict[int, Pass]] = {row: {} for row in rows}

    def __call__(self, number: int, rows: Sequence[int], forward: Pass, losses: dict[str, Tensor]) -> None:
        if not set(self.seen.get(number, ())).isdisjoint(rows):  # repeated after a lack of memory
            self.seen[number], self.sums[number] = [], {}
        self.seen.setdefault(number, []).extend(rows)
        sums = self.sums.setdefault(number, {})
        for name, loss in losses.items():
            sums[name] = sums.get(name, 0.0) + loss.item()
        for place, row in enumerate(rows):
            if row in self.traced:
                self.passes[row][number] = part_of(forward, slice(place, place + 1), slice(0, self.lengths[row]))


class TokenReader:
    """Reads the tokens of passes over one response each."""

    def __init__(self, config: PPOConfig, models: ActorCritic, plan: StepPlan, rollout: Rollout, pad_id: int) -> None:
        self.config, self.models, self.plan, self.rollout, self.pad_id = config, models, plan, rollout, pad_id

    def readings(self, row: int, forward: Pass) -> list[Reading]:
        """A reading of each token of the response in this row; `forward` is a pass over it."""
        kl_losses = self._kl_losses(row, forward)
        return [self._reading(token, kl) for token, kl in zip(_each_token(forward), kl_losses, strict=True)]

    def _reading(self, token: Pass, kl: float | None) -> Reading:
        """The losses and statistics of a pass over one token."""
        config, mask = self.config, token.batch.mask
        with torch.enable_grad():
            token = replace(token, logprobs=token.logprobs.detach().requires_grad_())
            loss = policy_loss(token, config, self.plan).sum()
            (slope,) = torch.autograd.grad(loss, token.logprobs)
        new, old, ratios = token.logprobs, token.old_logprobs, self.plan.uses_ratio and config.objective == "clip"
        critic, limit = self.models.has_critic, config.critic
        clips = limit.clip_value and self.plan.trains_policy
        value_loss = compute_value_loss(
            token.values, token.returns, token.old_values, clips, limit.value_clip, mask, reduction="sum"
        )
        moved = value_clip_fraction(token.values, token.old_values, limit.value_clip, mask).item() > 0
        return Reading(
            logprob=new.item(),
            ratio=torch.exp(new - old).item(),
            clipped=abs(torch.exp(new - old).item() - 1) > config.clip_ratio if ratios else None,
            pull=-slope.item(),
            policy_loss=loss.item(),
            value=token.values.item() if critic else None,
            value_clipped=moved if critic and clips else None,
            value_loss=value_loss.item() if critic else None,
            entropy=token.entropy.item(),
            kl_loss=kl,
        )

    def _kl_losses(self, row: int, forward: Pass) -> Sequence[float | None]:
        if self.config.kl.penalty != "loss":
            return [None] * forward.logprobs.shape[1]
        if self.config.kl.estimator != "full":
            return [kl_loss(token, self.config).sum().item() for token in _each_token(forward)]
        reference = self.models.predict_as_reference(self.rollout.batch([row], self.pad_id))
        return exact_kl(forward.predictions, reference, self.config.temperature).tolist()


def part_of(forward: Pass, rows: slice, times: slice) -> Pass:
    """Some rows and positions of a pass, without gradient; of its batch, only the mask is valid."""

    def cut(table: Tensor) -> Tensor:
        return table[rows, times].detach().clone()

    batch = TokenBatch(forward.batch.input_ids[rows], forward.batch.attention_mask[rows], cut(forward.batch.mask))
    tables = {
        name: cut(table) for name, table in vars(forward).items() if isinstance(table, Tensor) and name != "weights"
    }
    places = torch.arange(len(forward.batch.real[0]), device=batch.mask.device)
    kept = cut(forward.batch.spread(places))[batch.real]
    predictions = forward.predictions.at(kept).frozen()
    return replace(forward, batch=batch, weights=forward.weights[rows], predictions=predictions, **tables)  # type: ignore[arg-type]


def _each_token(forward: Pass) -> Iterator[Pass]:
    """Passes of [1, 1] over the tokens of a pass of one row."""
    for t in range(forward.logprobs.shape[1]):
        yield part_of(forward, slice(0, 1), slice(t, t + 1))
