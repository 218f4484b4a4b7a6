"""Parameters of the stage `best_of_n`: many answers of the SFT model to each held-out prompt."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.block import Block

Positive = Annotated[int, Field(ge=1)]


class BestOfNParams(Block):
    """The score is that of `scorer`; the sampling settings are those of `evaluate`."""

    enabled: bool
    """Run and evaluate this method."""
    n: Annotated[list[Positive], Field(min_length=1)] = Field(default_factory=lambda: [1, 2, 4, 8, 16])
    """Values of n, rising; the largest is the number of answers sampled per prompt."""

    @model_validator(mode="after")
    def _rises(self) -> "BestOfNParams":
        if self.n != sorted(set(self.n)):
            raise ValueError(f"n must rise, without repetition, not {self.n}")
        return self
