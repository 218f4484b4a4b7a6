"""The `promote:` block: when the policy of a nightly run becomes the champion. No stage tracks it."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.block import Block


class PromoteParams(Block):
    """When the policy of a nightly run becomes the champion: if all rules hold. The rules change no result."""

    enabled: bool = True
    """false: nightly runs keep the champion; only `leash promote VERSION` replaces it."""
    win_rate_above: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """The lower end of the 95% interval of the policy's win rate against the champion must be above this. Without a
    champion the rule holds."""
    allow_reward_model: bool = False
    """Without an independent judge, use the run's own reward model, which the policy may have over-optimised. false:
    without such a judge no champion is replaced."""
    kl_below: Annotated[float, Field(gt=0)] | None = None
    """The KL to the SFT model, in nats per answer, must be below this. null: no limit."""
    missing_eos_below: Annotated[float, Field(gt=0, le=1)] = 0.05
    """The share of answers without an end token must be below this."""
    allowed_alerts: list[str] = Field(default_factory=list)
    """Alerts of PPO that do not prevent promotion, such as `repetition`."""
