"""Parameters of the stage `evaluate`."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.config.block import Block, Share
from rlhf_core.config.paths import BelowRaw, FolderName

Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]

HELDOUT = "heldout"


class EvaluateParams(Block):
    """All models answer the same held-out prompts. By default once, and nothing else is sampled: with a real model each
    further answer takes time. `seeds`, `snapshots`, `interpolation` and `optimum_samples` ask for more."""

    prompts: BelowRaw = HELDOUT
    """`heldout`: the held-out prompts of the data. Otherwise a JSONL file of prompts below data/raw/."""
    max_prompts: Positive = 300
    """Largest number of prompts."""
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field(default_factory=lambda: [1])
    """Sampling seeds: each model answers each prompt once per seed."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; 1 is the model's own distribution."""
    max_new_tokens: Positive = 256
    """Longest answer, in tokens."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt, in tokens; `long_rows` says what happens to longer ones. null: what the model's context holds,
    also where PPO is trained on shorter ones (`ppo.max_prompt_tokens`)."""
    batch_size: Positive = 128
    """Responses sampled side by side; it changes no sample."""
    stop_tokens: list[str] = Field(default_factory=list)
    """Texts that end a response, besides end-of-sequence; must equal `ppo.stop_tokens`."""
    bootstrap: Annotated[int, Field(ge=100)] = 2000
    """Bootstrap resamples of the prompts for a 95% interval."""
    snapshots: Annotated[int, Field(ge=0)] = 0
    """PPO's snapshots on the frontier, if there are more: the policy's, the first, the last, the best by judge and
    reward model, and others that are spread over √KL. Those named stay even where they are more than this. 0: only the
    policy's."""
    interpolation: list[Share] = Field(default_factory=list)
    """Interpolated policies on the frontier: for each η the weights SFT + η·(policy − SFT)."""
    optimum_samples: Annotated[int, Field(ge=0)] = 0
    """Answers of the SFT model, and as many of the policy, to each prompt, from which the optimum against the scorer is
    estimated, the ceiling of the frontier: 4 or more. Those that are there already count: of `seeds`, of best-of-n. 0:
    none."""
    extra_models: list[FolderName] = Field(default_factory=list)
    """Names of Hugging Face folders below models/extra/ that are compared, too."""

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
