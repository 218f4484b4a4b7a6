"""Settings of the stage `reward`: the Bradley-Terry reward model."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.block import Block
from rlhf_core.config.lora import LoraSettings

Positive = Annotated[int, Field(ge=1)]


class RewardConfig(Block):
    """The Bradley-Terry reward model: a scalar head on the SFT model's body. All pairs of a prompt are in one batch."""

    learning_rate: Annotated[float, Field(gt=0, le=1)]
    """Peak learning rate: it rises over the warm-up, then falls along a cosine to 0."""
    epochs: Annotated[float, Field(gt=0)]
    """Passes over the pairs; a reward model overfits after one or a few."""
    batch_size: Positive
    """Prompts (not pairs) per optimizer step."""
    warmup_steps: Annotated[int, Field(ge=0)]
    """Optimizer steps in which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)]
    """Weight decay of AdamW; 0 switches it off."""
    max_tokens: Positive
    """Longest prompt plus response, in tokens; `long_rows` says what happens to longer rows."""
    lora: LoraSettings | None = None
