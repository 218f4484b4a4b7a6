"""Settings of the stage `sft`: supervised fine-tuning on the demonstrations."""

from pydantic import model_validator

from rlhf_core.config.block import Block, Count, LearningRate, NotNegative, Positive, PositiveNumber
from rlhf_core.config.lora import LoraSettings


class SFTConfig(Block):
    """Supervised fine-tuning: the loss is on the response only, and training stops early by the validation loss."""

    learning_rate: LearningRate
    """Peak learning rate: it rises over the warm-up, then falls along a cosine to 0."""
    epochs: PositiveNumber
    """Passes over the training rows."""
    batch_size: Positive
    """Demonstrations per optimizer step; a multiple of `micro_batch_size`."""
    micro_batch_size: Positive
    """Demonstrations per forward and backward pass; lower it when memory runs out."""
    warmup_steps: Count
    """Optimizer steps in which the learning rate rises from 0."""
    weight_decay: NotNegative
    """Weight decay of AdamW; 0 switches it off."""
    max_tokens: Positive
    """Longest prompt plus response, in tokens; `long_rows` says what happens to longer rows."""
    evaluate_every: Positive
    """Optimizer steps between two measurements of the validation loss."""
    patience: Count
    """Measurements without improvement before training stops; 0: train to the end."""
    lora: LoraSettings | None = None

    @model_validator(mode="after")
    def _batches_fit(self) -> "SFTConfig":
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of micro_batch_size {self.micro_batch_size}"
            )
        return self
