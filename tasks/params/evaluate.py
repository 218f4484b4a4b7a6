"""Parameters of the stage `evaluate`."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.block import Block, Share
from rlhf_core.config.paths import BelowRaw, FolderName

Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]

HELDOUT = "heldout"


class EvaluateParams(Block):
    """All models answer the same held-out prompts, by default once. `seeds`, `snapshots`, `interpolation` and
    `optimum_samples` cost more answers."""

    prompts: BelowRaw = HELDOUT
    """The held-out prompts of the data (`heldout`), or a JSONL file below data/raw/ without training prompts."""
    max_prompts: Positive = 300
    """Largest number of prompts."""
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field(default_factory=lambda: [1])
    """Sampling seeds: each model answers each prompt once per seed."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""
    max_new_tokens: Positive = 256
    """Longest answer, in tokens."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt, in tokens; for longer ones see `long_rows`. null: limited by the context alone, not by
    `ppo.max_prompt_tokens`."""
    batch_size: Positive = 128
    """Answers sampled at once. Changes only rounding."""
    stop_tokens: list[str] = Field(default_factory=list)
    """Must equal `ppo.stop_tokens`."""
    bootstrap: Annotated[int, Field(ge=100)] = 2000
    """Bootstrap resamples of the prompts for a 95% interval."""
    snapshots: Annotated[int, Field(ge=0)] = 0
    """Number of PPO's snapshots on the frontier, spread over √KL. The policy's, the first, the last and the best are
    always among them. 0: only the policy's."""
    interpolation: list[Share] = Field(default_factory=list)
    """Points of the frontier to add: for each η between 0 and 1 the weights SFT + η·(policy − SFT)."""
    optimum_samples: Annotated[int, Field(ge=0)] = 0
    """Answers per prompt of SFT model and policy each, to estimate the highest possible score at each KL (the
    frontier's ceiling). 0: no estimate; else 4 or more. Those of `seeds` and best-of-n count."""
    extra_models: list[FolderName] = Field(default_factory=list)
    """More models to compare: names of Hugging Face folders below models/extra/."""

    @model_validator(mode="after")
    def _enough_for_an_optimum(self) -> "EvaluateParams":
        if 0 < self.optimum_samples < 4:
            raise ValueError(f"optimum_samples {self.optimum_samples} are too few for an estimate; set 0, or 4 or more")
        return self

    @model_validator(mode="after")
    def _distinct(self) -> "EvaluateParams":
        for name in ("seeds", "extra_models", "interpolation"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} must be distinct, not {values}")
        return self
