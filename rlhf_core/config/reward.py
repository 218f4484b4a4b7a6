"""Settings of the stage `reward`: the Bradley-Terry reward model."""

from rlhf_core.config.block import Block, Count, LearningRate, NotNegative, Positive, PositiveNumber
from rlhf_core.config.lora import LoraSettings


class RewardConfig(Block):
    """The Bradley-Terry reward model: a scalar head on the SFT model's body. All pairs of a prompt are in one batch."""

    learning_rate: LearningRate
    """Peak learning rate: it rises over the warm-up, then falls along a cosine to 0."""
    epochs: PositiveNumber
    """Passes over the pairs; a reward model overfits after one or a few."""
    batch_size: Positive
    """Prompts (not pairs) per optimizer step."""
    warmup_steps: Count
    """Optimizer steps in which the learning rate rises from 0."""
    weight_decay: NotNegative
    """Weight decay of AdamW; 0 switches it off."""
    max_tokens: Positive
    """Longest prompt plus response, in tokens; `long_rows` says what happens to longer rows."""
    lora: LoraSettings | None = None
