"""Settings of a model from scratch and of its pretraining."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.block import Block

Positive = Annotated[int, Field(ge=1)]


class ScratchConfig(Block):
    """A Llama-type model with a byte-level BPE tokenizer trained on the training text."""

    vocabulary: Annotated[int, Field(ge=300)]
    """Tokens of the tokenizer at most, its two markers and the 256 bytes included."""
    context: Positive
    """Longest prompt plus answer, in tokens."""
    layers: Positive
    """Transformer blocks."""
    hidden: Positive
    """Width between the blocks: `heads` times an even number."""
    intermediate: Positive
    """Width inside the feed-forward part of a block."""
    heads: Positive
    """Attention heads of a block."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "ScratchConfig":
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(f"hidden {self.hidden} must be heads × an even number (heads is {self.heads})")
        return self


class PretrainConfig(Block):
    """Next-token prediction on the training text before SFT; 0 steps switch it off."""

    steps: Annotated[int, Field(ge=0)]
    """0: none of it; SFT starts at the base model as it is."""
    batch_size: Positive
    """Blocks of `scratch.context` tokens a step."""
    learning_rate: Annotated[float, Field(gt=0, le=1)]
    """The highest: it rises over the warm-up, then falls along a cosine to 0."""
