"""Parameters of the stage `select`: which of PPO's snapshots becomes the policy."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.block import Block


class SelectParams(Block):
    """Snapshots are compared on validation prompts: those of the preference data that the reward model was not trained
    on. They are sampled as `ppo` says."""

    rule: Literal["last", "best_judge", "best_proxy"]
    """`best_judge`: the highest mean score of the judge; `best_proxy`: of the reward model."""
    prompts: Annotated[int, Field(ge=0)]
    """Validation prompts at most; 0 compares nothing, and leaves only the rule `last`."""

    @model_validator(mode="after")
    def _compares(self) -> "SelectParams":
        if self.rule != "last" and self.prompts == 0:
            raise ValueError(f"rule {self.rule} compares snapshots; set prompts above 0")
        return self
