"""Parameters of the stage `select`: which of PPO's snapshots, or which interpolation, becomes the policy."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.block import Block, Share


class SelectParams(Block):
    """Which of PPO's snapshots, or interpolations of the last one, becomes the policy. Compared on validation prompts
    of the preference data, sampled as in `ppo`."""

    rule: Literal["last", "best_judge", "best_proxy"] = "last"
    """`last`: the last one (within `kl_budget`). `best_judge`, `best_proxy`: the highest mean score of the judge, or of
    `scorer`."""
    prompts: Annotated[int, Field(ge=0)] = 100
    """Largest number of validation prompts. 0: no comparison; needs `rule: last` and no `kl_budget`."""
    kl_budget: Annotated[float, Field(gt=0)] | None = None
    """Largest KL to the SFT model, in nats per answer, for the measured KL plus 1.645 standard errors. null: no
    limit."""
    interpolation: list[Share] = Field(default_factory=list)
    """Candidates to add: for each η between 0 and 1 the weights SFT + η·(last snapshot − SFT)."""

    @model_validator(mode="after")
    def _compares(self) -> "SelectParams":
        if self.rule != "last" and self.prompts == 0:
            raise ValueError(f"rule {self.rule} compares snapshots; set prompts above 0")
        if self.kl_budget is not None and self.prompts == 0:
            raise ValueError("kl_budget needs a measured KL; set prompts above 0")
        if len(set(self.interpolation)) != len(self.interpolation):
            raise ValueError(f"interpolation must be distinct, not {self.interpolation}")
        return self
