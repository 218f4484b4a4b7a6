"""Settings of the detectors that watch a PPO run: `ppo.health`. What they see, and what helps: docs/ppo.md."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.block import Block

PositiveNumber = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]


class HealthConfig(Block):
    """When a detector speaks. A lower threshold speaks sooner, except where it says otherwise."""

    window: Annotated[int, Field(ge=2)] = 5
    """PPO steps over which a figure is averaged before it is judged; an illness unseen for as long is over."""
    prompts: Annotated[int, Field(ge=100)] = 100
    """Prompts that such a window has at least; it grows where `window` steps have fewer."""
    hacking_deviations: PositiveNumber = 5.0
    """Reward hacking: standard errors by which a mean must differ to have moved; under 5, chance alone speaks in long
    runs."""
    hacking_kl: PositiveNumber = 0.5
    """Reward hacking without a judge: KL to the reference, in nats per token, at which a rising reward is no longer
    believed."""
    kl_jump: PositiveNumber = 0.2
    """KL spike: rise of KL to the reference in one step over the median of the window before, in nats per token."""
    update_kl: PositiveNumber = 0.1
    """KL spike: KL between the policy before and during one update (`approx_kl`), in nats per token."""
    entropy_share: Share = 0.2
    """Entropy collapse: share of the first step's entropy that must be left; a higher one speaks sooner."""
    critic_growth: Annotated[float, Field(gt=1)] = 4.0
    """Diverging critic: times its lowest value loss so far, while it predicts worse than a constant."""
    clip_fraction: Share = 0.3
    """Frozen reward: share of clipped tokens of an update that counts as saturated."""
    frozen_deviations: PositiveNumber = 2.0
    """Frozen reward: standard errors by which it must rise from one window to the next; a higher one speaks sooner."""
    late_clip_fraction: Share = 0.4
    """Stale data: share of clipped tokens in the last epoch of an update."""
    repetition_rise: Share = 0.2
    """Repetition: rise of the share of repeated 3-grams over that of the first step."""
    rollout_share: Share = 0.7
    """Generation-dominated wall clock: share of the rollout in the seconds of a step."""
