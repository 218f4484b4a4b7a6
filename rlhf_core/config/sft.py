"""Settings of the stage `sft`: supervised fine-tuning on the demonstrations."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.block import Block

Positive = Annotated[int, Field(ge=1)]


class SFTConfig(Block):
    """Supervised fine-tuning: the loss is on the response only, and training stops early by the validation loss."""

    learning_rate: Annotated[float, Field(gt=0, le=1)]
    """Peak learning rate: it rises over the warm-up, then falls along a cosine to 0."""
    epochs: Annotated[float, Field(gt=0)]
    """Passes over the training rows."""
    batch_size: Positive
    """Demonstrations per optimizer step; a multiple of `micro_batch_size`."""
    micro_batch_size: Positive
    """Demonstrations per forward and backward pass; lower it when memory runs out."""
    warmup_steps: Annotated[int, Field(ge=0)]
    """Optimizer steps in which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)]
    """Weight decay of AdamW; 0 switches it off."""
    max_tokens: Positive
    """Longest prompt plus response, in tokens; `long_rows` says what happens to longer rows."""
    evaluate_every: Positive
    """Optimizer steps between two measurements of the validation loss."""
    patience: Annotated[int, Field(ge=0)]
    """Measurements without improvement before training stops; 0: train to the end."""

    @model_validator(mode="after")
    def _batches_fit(self) -> "SFTConfig":
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of micro_batch_size {self.micro_batch_size}"
            )
        return self
