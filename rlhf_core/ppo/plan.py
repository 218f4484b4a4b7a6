"""Prompts of a step, rows of each minibatch, and coefficients: functions of seed, step and epoch, so that a resumed run
makes the same plan as an uninterrupted one."""

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
    """What one PPO step trains, how often, and with which coefficients."""

    step: int
    """Steps done before it."""
    trains_policy: bool
    """False while only the critic warms up."""
    uses_ratio: bool
    """False in the warm-up with the plain policy gradient."""
    epochs: int
    minibatches: int
    """Of each epoch; an optimiser step each."""
    kl_coef: float
    """β, of KL(π_θ ‖ π_ref), in units of the score per nat."""
    step_price: float
    """Of KL(π_old ‖ π_θ), in units of the advantage per nat; `objective: kl_penalty` only."""

    @classmethod
    def of(cls, config: PPOConfig, step: int, kl_coef: float, step_price: float) -> "StepPlan":
        """The plan of a step, counted from 0."""
        of_the_policy = step - config.critic.warmup_steps
        uses_ratio = not 0 <= of_the_policy < config.policy_gradient_steps
        return cls(
            step=step,
            trains_policy=of_the_policy >= 0,
            uses_ratio=uses_ratio,
            epochs=config.ppo_epochs if uses_ratio else 1,
            minibatches=config.minibatches if uses_ratio else 1,
            kl_coef=kl_coef,
            step_price=step_price,
        )
