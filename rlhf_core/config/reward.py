"""Settings of the stage `reward`: the Bradley-Terry reward model."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.block import Block
from rlhf_core.config.lora import LoraSettings

Positive = Annotated[int, Field(ge=1)]


class RewardConfig(Block):
    """A scalar head on the SFT model's body; all pairs of a prompt stand in one batch."""

    learning_rate: Annotated[float, Field(gt=0, le=1)]
    """The highest: it rises over the warm-up, then falls along a cosine to 0."""
    epochs: Annotated[float, Field(gt=0)]
    """Passes over the pairs; a reward model overfits after one or a few."""
    batch_size: Positive
    """Prompts, not pairs."""
    warmup_steps: Annotated[int, Field(ge=0)]
    """Steps in which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)]
    """AdamW's; 0 switches it off."""
    max_tokens: Positive
    """Longest prompt plus response, in tokens; longer rows are refused or dropped as `long_rows` says."""
    lora: LoraSettings | None = None
