"""The base of every block of settings, and the types of its numbers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveNumber = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=1)]


class Block(BaseModel):
    """A block of parameters: unknown keys, wrong types and later changes are refused. An integer is accepted as a
    number."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
