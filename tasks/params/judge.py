"""Parameters of the judge that win rates are measured by."""

from typing import Literal

from pydantic import model_validator

from rlhf_core.config.block import Block
from rlhf_core.config.paths import FolderName


class JudgeParams(Block):
    """The judge that decides which of two answers is better."""

    kind: Literal["data", "model"]
    """`data`: the judge of the data. The demo has one (its rubric, simulated); human data have none, so the reward
    model judges, and every page shows that. `model`: a language model, which compares each pair in both orders."""
    model: FolderName | None = None
    """With `kind: model`: name of its Hugging Face folder below models/judges/."""

    @model_validator(mode="after")
    def _names_its_model(self) -> "JudgeParams":
        if (self.kind == "model") != (self.model is not None):
            raise ValueError("kind: model needs the name of a folder below models/judges/ in `model`, and only it does")
        return self
