"""Settings of the methods that train on preference pairs, and those of DPO."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.block import Block, Count, LearningRate, NotNegative, Positive, PositiveNumber
from rlhf_core.config.lora import LoraSettings, require_divisible
from rlhf_core.config.precision import Recomputed


class PairConfig(Block):
    """Training on the pairs of the reward model, from the SFT model, which is the reference."""

    enabled: bool
    """Off: the stage writes empty outputs, and `evaluate` leaves it out."""
    learning_rate: LearningRate = 5e-7
    """Peak learning rate: it rises over the warm-up, then falls along a cosine to 0."""
    epochs: PositiveNumber = 1.0
    """Passes over the pairs."""
    batch_size: Positive = 32
    """Prompts, not pairs: all pairs of a prompt are in one batch."""
    warmup_steps: Count = 10
    """Optimizer steps in which the learning rate rises from 0."""
    weight_decay: NotNegative = 0.0
    """Weight decay of AdamW; 0 switches it off."""
    max_tokens: Positive = 1024
    """Longest prompt plus response, in tokens; `long_rows` says what happens to longer rows."""
    micro_batch_tokens: Positive = 8192
    """Tokens of a forward and backward pass, which reads whole prompts with all their answers: each prompt once, each
    answer once. Lower it when memory runs out; it changes no result, except for rounding. On a CPU at most 2048."""
    gradient_checkpointing: Recomputed = False
    """Recompute activations in the backward pass: of no layer (false), of every layer (true), or of every n-th layer.
    Less memory, more time."""
    lora: LoraSettings | None = None
    processes: Positive = 1
    """Processes over which the model is divided while it is trained (FSDP2): one per GPU, or several on a CPU. Each has
    its part of every weight, gradient and optimizer state. Changes no result, except for rounding."""

    @model_validator(mode="after")
    def _divisible(self) -> "PairConfig":
        require_divisible(self.processes, self.lora)
        return self


class DPOConfig(PairConfig):
    """Direct preference optimisation (Rafailov et al. 2023) from the SFT model, which is the reference."""

    beta: PositiveNumber = 0.1
    """Strength of the KL regularisation: the reward that DPO fits is β·log(π/π_ref)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with the wrong label (conservative DPO)."""
