"""Parameters of the stage `select`: which of PPO's snapshots, or which interpolation, becomes the policy."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.block import Block, Share


class SelectParams(Block):
    """Which of PPO's snapshots, or which interpolation of the last one, becomes the policy. They are compared on
    validation prompts: prompts of the preference data that the reward model was not trained on. Answers are sampled
    with the settings of `ppo`."""

    rule: Literal["last", "best_judge", "best_proxy"] = "last"
    """`last`: the last one; with `kl_budget` the last one within it. `best_judge`: the highest mean score of the judge.
    `best_proxy`: the highest mean score of the reward model."""
    prompts: Annotated[int, Field(ge=0)] = 100
    """Largest number of validation prompts; 0: no comparison, and only `rule: last` without `kl_budget` is possible."""
    kl_budget: Annotated[float, Field(gt=0)] | None = None
    """Largest KL to the SFT model, in nats per answer. A candidate is within it if its KL on the validation prompts,
    plus 1.645 standard errors, is. null: no limit."""
    interpolation: list[Share] = Field(default_factory=list)
    """For each η the weights SFT + η·(last snapshot − SFT) are a candidate, too."""

    @model_validator(mode="after")
    def _compares(self) -> "SelectParams":
        if self.rule != "last" and self.prompts == 0:
            raise ValueError(f"rule {self.rule} compares snapshots; set prompts above 0")
        if self.kl_budget is not None and self.prompts == 0:
            raise ValueError("kl_budget needs a measured KL; set prompts above 0")
        if len(set(self.interpolation)) != len(self.interpolation):
            raise ValueError(f"interpolation must be distinct, not {self.interpolation}")
        return self
