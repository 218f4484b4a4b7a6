"""Losses and statistics of single tokens, from the functions of PPO's loss."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.inspect.trace.records import Reading
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.head import Predictions
from rlhf_core.ppo.objective import Pass, losses_of
from rlhf_core.ppo.statistics import value_clip_fraction


class PassRecorder:
    """Records the losses of each minibatch, summed, and the passes over the traced rows."""

    def __init__(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.traced, self.lengths = frozenset(rows), lengths
        self.seen: dict[int, list[int]] = {}
        self.sums: dict[int, dict[str, float]] = {}
        self.passes: dict[int, dict[int, Pass]] = {row: {} for row in rows}

    def __call__(self, number: int, rows: Sequence[int], forward: Pass, losses: dict[str, Tensor]) -> None:
        self.seen.setdefault(number, []).extend(rows)
        sums = self.sums.setdefault(number, {})
        for name, loss in losses.items():
            sums[name] = sums.get(name, 0.0) + loss.item()
        for place, row in enumerate(rows):
            if row in self.traced:
                self.passes[row][number] = part_of(forward, slice(place, place + 1), slice(0, self.lengths[row]))


def readings(forward: Pass, config: PPOConfig, kl_coef: float, trains_policy: bool) -> list[Reading]:
    """A reading of each token of a pass over one response, with the losses that train it."""
    clips = config.critic.clip_value and trains_policy
    found = []
    for t in range(forward.logprobs.shape[1]):
        token = part_of(forward, slice(0, 1), slice(t, t + 1))
        with torch.enable_grad():
            token = replace(token, logprobs=token.logprobs.requires_grad_(), weights=torch.ones_like(token.weights))
            losses = losses_of(token, config, kl_coef, trains_policy)
            (slope,) = torch.autograd.grad(losses["policy_loss"], token.logprobs)
        ratio = torch.exp(token.logprobs - token.old_logprobs).item()
        moved = value_clip_fraction(token.values, token.old_values, config.critic.value_clip, token.batch.mask)
        reading = Reading(
            logprob=token.logprobs.item(),
            ratio=ratio,
            clipped=abs(ratio - 1) > config.clip_ratio,
            pull=-slope.item(),
            policy_loss=losses["policy_loss"].item(),
            value=token.values.item() if config.has_critic else None,
            value_clipped=moved.item() > 0 if config.has_critic and clips else None,
            value_loss=losses["value_loss"].item() if config.has_critic else None,
            entropy=token.entropy.item(),
            kl_loss=losses["kl_loss"].item() if "kl_loss" in losses else None,
        )
        found.append(reading)
    return found


def part_of(forward: Pass, rows: slice, times: slice) -> Pass:
    """Some rows and positions of a pass, without gradient and predictions; of its batch, only the mask is valid."""

    def cut(table: Tensor) -> Tensor:
        return table[rows, times].detach().clone()

    batch = TokenBatch(forward.batch.input_ids[rows], forward.batch.attention_mask[rows], cut(forward.batch.mask))
    tables = {name: cut(table) for name, table in vars(forward).items() if isinstance(table, Tensor)}
    return replace(forward, batch=batch, predictions=Predictions(torch.empty(0)), **tables)  # type: ignore[arg-type]
