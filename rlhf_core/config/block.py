"""What every block of settings has in common: strict types, no unknown keys, no later changes."""

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """A block of parameters: unknown keys, wrong types and later changes are refused. Integers pass where a number
    is asked."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
