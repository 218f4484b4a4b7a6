"""Settings of the stage `sft`: supervised fine-tuning on the demonstrations."""

from typing import Literal

from pydantic import model_validator

from rlhf_core.config.block import Block, Count, LearningRate, NotNegative, Positive, PositiveNumber
from rlhf_core.config.lora import LoraSettings, require_divisible
from rlhf_core.config.precision import Recomputed


class SFTConfig(Block):
    """Supervised fine-tuning: the loss is on the response only, and training stops early by the validation loss."""

    enabled: bool = True
    """`false`: the base model is the SFT model, for models that answer already. The other keys are then not used, and
    the data need no demonstrations."""
    turns: Literal["last", "all"] = "last"
    """Which turns of the assistant are imitated in a conversation: the response alone (`last`), or also the earlier
    ones, which are in the prompt (`all`)."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate: it rises over the warm-up, then falls along a cosine to 0."""
    epochs: PositiveNumber = 1.0
    """Passes over the training rows."""
    batch_size: Positive = 32
    """Demonstrations per optimizer step; a multiple of `micro_batch_size` × `processes`."""
    micro_batch_size: Positive = 8
    """Demonstrations per forward and backward pass of a process; lower it when memory runs out."""
    warmup_steps: Count = 20
    """Optimizer steps in which the learning rate rises from 0."""
    weight_decay: NotNegative = 0.0
    """Weight decay of AdamW; 0 switches it off."""
    max_tokens: Positive = 1024
    """Longest prompt plus response, in tokens; `long_rows` says what happens to longer rows."""
    evaluate_every: Positive = 50
    """Optimizer steps between two measurements of the validation loss."""
    patience: Count = 3
    """Measurements without improvement before training stops; 0: train to the end."""
    lora: LoraSettings | None = None
    processes: Positive = 1
    """Processes over which the model is divided while it is trained (FSDP2): one per GPU, or several on a CPU. Each has
    its part of every weight, gradient and optimizer state. Changes no result, except for rounding. `rejection_sft` runs
    in one process."""
    gradient_checkpointing: Recomputed = False
    """Recompute activations in the backward pass: of no layer (false), of every layer (true), or of every n-th layer.
    Less memory, more time."""

    @model_validator(mode="after")
    def _batches_fit(self) -> "SFTConfig":
        if self.batch_size % (self.micro_batch_size * self.processes):
            times = "" if self.processes == 1 else f" times processes {self.processes}"
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of micro_batch_size {self.micro_batch_size}{times}"
            )
        require_divisible(self.processes, self.lora)
        return self
