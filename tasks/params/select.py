"""Parameters of the stage `select`: which of PPO's snapshots becomes the policy."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.block import Block


class SelectParams(Block):
    """Which of PPO's snapshots becomes the policy. They are compared on validation prompts: prompts of the preference
    data that the reward model was not trained on. Answers are sampled with the settings of `ppo`."""

    rule: Literal["last", "best_judge", "best_proxy"]
    """`last`: the last one. `best_judge`: the highest mean score of the judge. `best_proxy`: the highest mean score of
    the reward model."""
    prompts: Annotated[int, Field(ge=0)]
    """Largest number of validation prompts; 0: no comparison, and only `rule: last` is possible."""

    @model_validator(mode="after")
    def _compares(self) -> "SelectParams":
        if self.rule != "last" and self.prompts == 0:
            raise ValueError(f"rule {self.rule} compares snapshots; set prompts above 0")
        return self
