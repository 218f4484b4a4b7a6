"""Parameters of the stage `rejection_sft`: sample, keep the best, fine-tune."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.block import Block
from rlhf_core.config.sft import SFTConfig

Positive = Annotated[int, Field(ge=1)]


class RejectionParams(Block):
    """SFT continues on the best sampled answer to each of PPO's prompts, by `scorer`; answers that were cut off come
    last."""

    enabled: bool
    """Run and evaluate this method."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Answers per prompt, of which the best is kept."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""
    max_new_tokens: Positive = 256
    """Longest answer, in tokens."""
    batch_size: Positive = 128
    """Answers sampled at once. Changes only rounding."""
    stop_tokens: list[str] = Field(default_factory=list)
    """Must equal `ppo.stop_tokens`."""
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the prompts for the validation loss."""
    training: SFTConfig | None = None
    """Required if enabled: the keys of `sft`, with `enabled`, `turns` and `processes` at their defaults."""

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
