"""Parameters of rounds: samples, labels, reward model and PPO again and again, each time from the last policy."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.block import Block


class RoundParams(Block):
    """What changes from round to round; `leash round` closes a round. A project without closed rounds is in round 1."""

    reference: Literal["sft", "previous"] = "sft"
    """The reference of the KL penalty from round 2 on. `sft`: the SFT model, so the penalty is on the KL to it.
    `previous`: the policy of the round before, so the penalty is on the KL of this round, and the KL to SFT adds up."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of the preference prompts whose answers are sampled in one round. Round n takes the n-th part of a random
    order by `seed`, and starts again at the end: three rounds with a third each sample every prompt once."""
