"""Settings of the methods that train on preference pairs, and those of DPO."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.block import Block, Count, LearningRate, NotNegative, Positive, PositiveNumber
from rlhf_core.config.lora import LoraSettings, require_divisible
from rlhf_core.config.precision import Recomputed


class PairConfig(Block):
    """Training on the pairs of the reward model, from the SFT model, which is the reference."""

    enabled: bool
    """Run and evaluate this method."""
    learning_rate: LearningRate = 5e-7
    """Peak learning rate; cosine decay to 0."""
    epochs: PositiveNumber = 1.0
    """Passes over the pairs."""
    batch_size: Positive = 32
    """Prompts per optimizer step, each with all its pairs."""
    warmup_steps: Count = 10
    """Optimizer steps in which the learning rate rises."""
    weight_decay: NotNegative = 0.0
    """Of AdamW."""
    max_tokens: Positive = 1024
    """Longest prompt plus answer, in tokens (see `long_rows`)."""
    micro_batch_tokens: Positive = 8192
    """Tokens per forward and backward pass, on a CPU at most 2048. Changes only rounding."""
    gradient_checkpointing: Recomputed = False
    """Recompute activations: less memory, more time. true: of all layers; n: of every n-th."""
    lora: LoraSettings | None = None
    processes: Positive = 1
    """Processes that divide the model (FSDP2): one per GPU, or several on a CPU."""

    @model_validator(mode="after")
    def _divisible(self) -> "PairConfig":
        require_divisible(self.processes, self.lora)
        return self


class DPOConfig(PairConfig):
    """Rafailov et al. 2023, on the reward model's pairs; the SFT model is start and reference."""

    beta: PositiveNumber = 0.1
    """Strength of the KL regularisation: the implicit reward is β·log(π/π_ref)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with the wrong label (conservative DPO)."""
