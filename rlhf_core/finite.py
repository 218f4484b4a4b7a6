"""A check that refuses NaN and infinity in any state before it is written."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf_core.errors import NonFiniteError


def require_finite(state: Any, name: str = "state") -> None:
    """Raise NonFiniteError, naming the place, when a tensor or number anywhere in `state` (mappings and sequences of
    them) is NaN or infinite. Called before weights and optimisers are written."""
    for place, value in _numbers(state, name):
        if not (torch.isfinite(value).all() if isinstance(value, Tensor) else math.isfinite(value)):
            raise NonFiniteError(f"{place} is not finite and was not written; lower the learning rate")


def _numbers(state: Any, place: str) -> Iterator[tuple[str, Tensor | float]]:
    if isinstance(state, Tensor):
        if state.is_floating_point():
            yield place, state.to_local() if isinstance(state, DTensor) else state  # this process' part
    elif isinstance(state, float):
        yield place, state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from _numbers(value, f"{place}.{key}")
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _numbers(value, f"{place}.{index}")


@contextmanager
def at_step(step: int) -> Iterator[None]:
    """Add the step (counted from 1) to the message of a NonFiniteError that the block raises."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"step {step}: {error}") from None
