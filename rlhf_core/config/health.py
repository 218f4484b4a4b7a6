"""Thresholds of the alerts of a PPO run: `ppo.health`."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.block import Block, PositiveNumber, Share


class HealthConfig(Block):
    """Thresholds of the detectors of failure modes. A lower threshold gives an earlier alert, except where noted."""

    window: Annotated[int, Field(ge=2)] = 5
    """PPO steps over which a figure is averaged. A failure mode that is not seen for this many steps has ended."""
    prompts: Annotated[int, Field(ge=100)] = 100
    """Smallest number of prompts in a window; the window grows where `window` steps have fewer."""
    hacking_deviations: PositiveNumber = 5.0
    """Reward hacking: standard errors by which a mean must move; below 5, long runs give alerts by chance."""
    hacking_kl: PositiveNumber = 0.25
    """Reward hacking without a judge: alert when the reward rises and the KL to the reference is above this, in nats
    per token."""
    kl_jump: PositiveNumber = 0.2
    """KL spike: rise of the KL to the reference in one step above the median of the window before, in nats per
    token."""
    update_kl: PositiveNumber = 0.1
    """KL spike: KL between the policy before and after one update (`update_kl`), in nats per token."""
    entropy_share: Share = 0.2
    """Entropy collapse: share of the first step's entropy that must remain; a higher value gives an earlier alert."""
    critic_growth: Annotated[float, Field(gt=1)] = 4.0
    """Diverging critic: value loss as a multiple of its lowest value so far, while the critic predicts worse than a
    constant."""
    clip_fraction: Share = 0.3
    """Frozen reward: share of clipped tokens in an update above which the reward must still rise."""
    frozen_deviations: PositiveNumber = 2.0
    """Frozen reward: standard errors by which the reward must rise from one window to the next; a higher value gives an
    earlier alert."""
    late_clip_fraction: Share = 0.4
    """Stale data: share of clipped tokens in the last epoch of an update."""
    repetition_rise: Share = 0.2
    """Repetition: rise since the first step of the share of repeated 3-grams, or of the share of answers that repeat
    two tokens in a row."""
    length_factor: Annotated[float, Field(gt=1)] = 2.0
    """Length drift: answers are this many times longer or shorter than in the first step."""
    missing_eos_rise: Share = 0.2
    """Missing ends: rise of the share of answers that were cut off since the first step."""
    gradient_factor: Annotated[float, Field(gt=1)] = 20.0
    """Exploding gradient: norm of a gradient as a multiple of its median so far."""
    lowest_token_reward: PositiveNumber = 10.0
    """Huge penalty: the most negative reward of a token is below minus this, in units of the score."""
    engine_kl: PositiveNumber = 0.01
    """Engine mismatch: KL between the sampler and the trained model (`engine_mismatch_k3`), in nats per token."""
    rollout_share: Share = 0.7
    """Slow generation: share of a step's seconds that the rollout takes."""
