"""Settings of a model from scratch and of its pretraining."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.block import Block

Positive = Annotated[int, Field(ge=1)]


class ScratchConfig(Block):
    """A Llama-type model with a byte-level BPE tokenizer trained on the training text."""

    vocabulary: Annotated[int, Field(ge=300)]
    context: Positive
    layers: Positive
    hidden: Positive
    intermediate: Positive
    heads: Positive

    @model_validator(mode="after")
    def _heads_divide(self) -> "ScratchConfig":
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(f"hidden {self.hidden} must be heads × an even number (heads is {self.heads})")
        return self


class PretrainConfig(Block):
    """Next-token prediction on the training text before SFT; 0 steps switch it off."""

    steps: Annotated[int, Field(ge=0)]
    batch_size: Positive
    learning_rate: Annotated[float, Field(gt=0, le=1)]
