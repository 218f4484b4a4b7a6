"""Parameters of the stage `rejection_sft`: sample, keep the best, fine-tune."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.block import Block
from rlhf_core.config.sft import SFTConfig

Positive = Annotated[int, Field(ge=1)]


class RejectionParams(Block):
    """Rejection-sampling SFT: sample answers to PPO's prompts, keep the best of each prompt by the reward model, and
    continue SFT on them."""

    enabled: bool
    """`false`: the stage writes empty outputs, and `evaluate` leaves the model out."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Answers to each prompt, of which the best is kept."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; 1 is the model's own distribution."""
    max_new_tokens: Positive = 256
    """Longest answer, in tokens."""
    batch_size: Positive = 128
    """Responses sampled side by side; it changes no sample."""
    stop_tokens: list[str] = Field(default_factory=list)
    """Texts that end a response, besides end-of-sequence; must equal `ppo.stop_tokens`."""
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the prompts used for the validation loss instead of training."""
    training: SFTConfig | None = None
    """Required where the stage is enabled; the keys of `sft`."""

    @model_validator(mode="after")
    def _knows_how_to_train(self) -> "RejectionParams":
        if self.enabled and self.training is None:
            raise ValueError("enabled needs the block `training`, with the keys of `sft`")
        if self.training is not None and self.training.processes > 1:
            raise ValueError("training.processes must be 1: this stage runs in one process")
        if self.training is not None and (not self.training.enabled or self.training.turns != "last"):
            raise ValueError(
                "training.enabled and training.turns are for `sft` alone: this stage trains on the answers that it has "
                "sampled; remove them"
            )
        return self
