"""Settings of the stage `dpo`: direct preference optimisation on the pairs that the reward model learns from."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.block import Block
from rlhf_core.config.lora import LoraSettings

Positive = Annotated[int, Field(ge=1)]


class DPOConfig(Block):
    """DPO from the SFT model, which is its reference; all pairs of a prompt stand in one batch."""

    enabled: bool
    """Off: the stage writes empty outputs, and `evaluate` leaves it out."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the leash: the reward that DPO fits is β·log(π/π_ref)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs that are believed to be the wrong way round (conservative DPO)."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 5e-7
    """The highest: it rises over the warm-up, then falls along a cosine to 0."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the pairs."""
    batch_size: Positive = 32
    """Prompts, not pairs."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Steps in which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's; 0 switches it off."""
    max_tokens: Positive = 1024
    """Longest prompt plus response, in tokens; longer rows are refused or dropped as `long_rows` says."""
    lora: LoraSettings | None = None
