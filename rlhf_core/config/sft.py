"""Settings of the stage `sft`: supervised fine-tuning on the demonstrations."""

from typing import Literal

from pydantic import model_validator

from rlhf_core.config.block import Block, Count, LearningRate, NotNegative, Positive, PositiveNumber
from rlhf_core.config.lora import LoraSettings, require_divisible
from rlhf_core.config.precision import Recomputed


class SFTConfig(Block):
    """Supervised fine-tuning. The loss is on the answer only; the weights with the lowest validation loss are kept."""

    enabled: bool = True
    """`false`: the base model is the SFT model. The data then need no demonstrations, and the other keys are not
    used."""
    turns: Literal["last", "all"] = "last"
    """In conversations, train on the last answer, or on all turns of the assistant."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate; cosine decay to 0."""
    epochs: PositiveNumber = 1.0
    """Passes over the training rows."""
    batch_size: Positive = 32
    """Demonstrations per optimizer step; a multiple of `micro_batch_size` × `processes`."""
    micro_batch_size: Positive = 8
    """Demonstrations per forward and backward pass of a process. Lower it if memory runs out."""
    warmup_steps: Count = 20
    """Optimizer steps in which the learning rate rises."""
    weight_decay: NotNegative = 0.0
    """Of AdamW."""
    max_tokens: Positive = 1024
    """Longest prompt plus answer, in tokens (see `long_rows`)."""
    evaluate_every: Positive = 50
    """Optimizer steps between measurements of the validation loss."""
    patience: Count = 3
    """Measurements without improvement until training stops. 0: train to the end."""
    lora: LoraSettings | None = None
    processes: Positive = 1
    """Processes that divide the model (FSDP2): one per GPU, or several on a CPU."""
    gradient_checkpointing: Recomputed = False
    """Recompute activations: less memory, more time. true: of all layers; n: of every n-th."""

    @model_validator(mode="after")
    def _batches_fit(self) -> "SFTConfig":
        if self.batch_size % (self.micro_batch_size * self.processes):
            times = "" if self.processes == 1 else f" times processes {self.processes}"
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of micro_batch_size {self.micro_batch_size}{times}"
            )
        require_divisible(self.processes, self.lora)
        return self
