"""Settings of all stages that compute with a model: precision, and which activations are recomputed."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

Precision = Literal["float32", "bfloat16"]
"""Of matrix products, and of the weights of models that are not trained."""

Frozen = Literal["float32", "bfloat16", "nf4"]
"""Of the weights of a model that is not trained; nf4: linear layers in 4 bits, the rest in bfloat16."""


def _one_message(value: Any) -> Any:
    """Raise ValueError for what is neither a boolean nor a number of layers: a union would give two messages."""
    if not isinstance(value, bool) and not (isinstance(value, int) and value >= 1):
        raise ValueError("give false, true, or n (1 or more) for every n-th layer")
    return value


Recomputed = Annotated[bool | int, BeforeValidator(_one_message)]
"""Layers whose activations are recomputed in the backward pass: none (false), all (true), every n-th."""
