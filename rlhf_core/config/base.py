"""Settings of a model from scratch and of its pretraining."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.block import Block, Count, LearningRate, Positive


class ScratchConfig(Block):
    """A Llama model with random weights, and a byte-level BPE tokenizer trained on the training text."""

    vocabulary: Annotated[int, Field(ge=300)]
    """Largest number of tokens, including two special tokens and 256 bytes."""
    context: Positive
    """Longest prompt plus answer, in tokens."""
    layers: Positive
    """Transformer blocks."""
    hidden: Positive
    """Hidden size: `heads` times an even number."""
    intermediate: Positive
    """Hidden size of the feed-forward layers."""
    heads: Positive
    """Attention heads per block."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "ScratchConfig":
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(f"hidden {self.hidden} must be heads × an even number (heads is {self.heads})")
        return self


class PretrainConfig(Block):
    """Next-token prediction on the training text before SFT."""

    steps: Count = 0
    """Optimizer steps. 0: no pretraining."""
    batch_size: Positive = 64
    """Blocks per optimizer step, each as long as the model's context."""
    learning_rate: LearningRate = 1e-3
    """Peak learning rate: linear warm-up over the first 5% of the steps, then cosine decay to 0."""
