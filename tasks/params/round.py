"""Parameters of rounds: samples, labels, reward model and PPO again and again, each time from the last policy."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.block import Block


class RoundParams(Block):
    """What changes from round to round. `leash round` closes a round; until then a project is in round 1."""

    reference: Literal["sft", "previous"] = "sft"
    """Reference of the KL penalty from round 2 on. `sft`: the SFT model. `previous`: the policy of the previous round;
    the KL to the SFT model then adds up."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the preference prompts sampled in one round. With a third, three rounds sample every prompt once; the
    fourth starts again."""
