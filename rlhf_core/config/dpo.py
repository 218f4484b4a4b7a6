"""Settings of the stage `dpo`: direct preference optimisation on the pairs that the reward model learns from."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.block import Block
from rlhf_core.config.lora import LoraSettings

Positive = Annotated[int, Field(ge=1)]


class DPOConfig(Block):
    """DPO from the SFT model, which is also the reference. All pairs of a prompt are in one batch."""

    enabled: bool
    """`false`: the stage writes empty outputs, and `evaluate` leaves the model out."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """β: the implicit reward is β·log(π/π_ref); a larger β keeps the policy nearer to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with the wrong label (conservative DPO)."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 5e-7
    """Peak learning rate: it rises over the warm-up, then falls along a cosine to 0."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the pairs."""
    batch_size: Positive = 32
    """Prompts (not pairs) per optimizer step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps in which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW; 0 switches it off."""
    max_tokens: Positive = 1024
    """Longest prompt plus response, in tokens; `long_rows` says what happens to longer rows."""
    lora: LoraSettings | None = None
