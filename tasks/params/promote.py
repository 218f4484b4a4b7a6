"""The `promote:` block: when the policy of a nightly run becomes the champion. No stage tracks it."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.block import Block


class PromoteParams(Block):
    """When the policy of a nightly run becomes the champion: every rule must hold. They change no result, and no stage
    depends on them."""

    enabled: bool = True
    """false: nightly runs do not touch the champion; `leash promote` does it by hand."""
    win_rate_above: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """The lower end of the 95% interval of its win rate against the champion, on the same held-out prompts, must be
    above this. Without a champion the rule holds."""
    allow_reward_model: bool = False
    """true: where the data have no judge, the win rate by the run's own reward model decides. PPO has maximised
    that model, so its policy may win by over-optimising it."""
    kl_below: Annotated[float, Field(gt=0)] | None = None
    """Its KL to the SFT model, in nats per answer, must be below this. null: no limit."""
    missing_eos_below: Annotated[float, Field(gt=0, le=1)] = 0.05
    """The share of its answers without an end token must be below this."""
    allowed_alerts: list[str] = Field(default_factory=list)
    """Alerts of PPO that do not keep it from becoming the champion, such as `repetition`."""
