"""Parameters of the stage `evaluate`."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.block import Block

Positive = Annotated[int, Field(ge=1)]


class EvaluateParams(Block):
    """SFT against policy on the held-out prompts."""

    prompts: Positive
    """How many held-out prompts at most."""
    temperature: Annotated[float, Field(gt=0)]
    max_new_tokens: Positive
    batch_size: Positive
    """Responses sampled side by side; changes no sample."""
    stop_tokens: list[str] = Field(default_factory=list)
    """Texts that end a response beside end-of-sequence; the same as `ppo.stop_tokens`."""
    bootstrap: Annotated[int, Field(ge=100)]
    """Resamples of the prompts behind a 95% interval."""
