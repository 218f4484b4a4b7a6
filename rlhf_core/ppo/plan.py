"""Prompts of a step and rows of each minibatch: functions of seed, step and epoch, so that a resumed run makes the same
plan as an uninterrupted one."""

from dataclasses import dataclass

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.determinism import permutation

PROMPTS, MINIBATCHES, ROLLOUT, SAMPLES, TEXT, REFERENCE, WATCHED = range(7)
"""First number of each key after the seed, so that all streams are different."""


def prompts_of_step(step: int, batch_size: int, prompts: int, seed: int) -> list[int]:
    """Indices of the prompts of a step (counted from 0). Every prompt is used once before any is used again; the order
    is new in each round."""
    first = step * batch_size
    positions = [divmod(first + place, prompts) for place in range(batch_size)]
    orders = {turn: permutation(prompts, seed, PROMPTS, turn) for turn in {turn for turn, _ in positions}}
    return [orders[turn][place] for turn, place in positions]


def minibatches_of_epoch(rows: int, minibatches: int, seed: int, step: int, epoch: int) -> list[list[int]]:
    """The rows of each minibatch of an epoch (counted from 0), in a new order in each."""
    order = permutation(rows, seed, MINIBATCHES, step, epoch)
    size = rows // minibatches
    return [order[start : start + size] for start in range(0, size * minibatches, size)]


@dataclass(frozen=True)
class StepPlan:
    """What one PPO step trains, and how often."""

    step: int
    """Steps done before it."""
    trains_policy: bool
    """False while only the critic warms up."""
    epochs: int
    minibatches: int
    """Of each epoch; an optimiser step each."""

    @classmethod
    def of(cls, config: PPOConfig, step: int) -> "StepPlan":
        """The plan of a step, counted from 0. In the warm-up with the plain policy gradient there is one epoch of one
        minibatch: the ratio is 1, where the gradient of PPO's loss is that of −A·log π_θ."""
        of_the_policy = step - config.critic_warmup_steps
        if 0 <= of_the_policy < config.policy_gradient_steps:
            return cls(step, True, 1, 1)
        return cls(step, of_the_policy >= 0, config.ppo_epochs, config.minibatches)
