"""Parameters of the stage `rejection_sft`: sample, keep the best, fine-tune."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.block import Block
from rlhf_core.config.sft import SFTConfig

Positive = Annotated[int, Field(ge=1)]


class RejectionParams(Block):
    """Answers of the SFT model to PPO's prompts; the reward model keeps the best of each, and SFT goes on."""

    enabled: bool
    """Off: the stage writes empty outputs, and `evaluate` leaves it out."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Answers to each prompt, of which the best is kept."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the sampling; 1 is the model's own distribution."""
    max_new_tokens: Positive = 256
    """Longest answer, in tokens."""
    batch_size: Positive = 128
    """Responses sampled side by side; changes no sample."""
    stop_tokens: list[str] = Field(default_factory=list)
    """Texts that end a response beside end-of-sequence; the same as `ppo.stop_tokens`."""
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the prompts whose best answers measure the loss instead of lowering it."""
    training: SFTConfig | None = None
    """Needed where the stage is enabled."""

    @model_validator(mode="after")
    def _knows_how_to_train(self) -> "RejectionParams":
        if self.enabled and self.training is None:
            raise ValueError("enabled needs the block `training`, with the keys of `sft`")
        return self
