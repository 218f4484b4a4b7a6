"""Parameters of the judge that win rates are measured by."""

from typing import Literal

from pydantic import model_validator

from rlhf_core.config.block import Block
from rlhf_core.config.paths import FolderName


class JudgeParams(Block):
    """Who says which of two answers is better."""

    kind: Literal["data", "model"]
    """`data`: the judge that the data bring, which for the demo is its rubric (simulated); data of people bring none,
    and the reward model judges, which is said wherever it is shown. `model`: a language model, asked in both orders."""
    model: FolderName | None = None
    """Its Hugging Face folder below models/judges/."""

    @model_validator(mode="after")
    def _names_its_model(self) -> "JudgeParams":
        if (self.kind == "model") != (self.model is not None):
            raise ValueError("kind: model needs the name of a folder below models/judges/ in `model`, and only it does")
        return self
