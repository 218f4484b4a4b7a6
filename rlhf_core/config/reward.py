"""Settings of the stage `reward`: the Bradley-Terry reward model."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.block import Block
from rlhf_core.config.lora import LoraSettings

Positive = Annotated[int, Field(ge=1)]


class RewardConfig(Block):
    """A scalar head on the SFT model's body; all pairs of a prompt stand in one batch."""

    learning_rate: Annotated[float, Field(gt=0, le=1)]
    epochs: Annotated[float, Field(gt=0)]
    batch_size: Positive
    """Prompts, not pairs."""
    warmup_steps: Annotated[int, Field(ge=0)]
    weight_decay: Annotated[float, Field(ge=0)]
    max_tokens: Positive
    lora: LoraSettings | None = None
