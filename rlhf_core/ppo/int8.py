"""Adam with 8-bit states (Dettmers et al. 2022), of `bitsandbytes`, which is optional."""

from collections.abc import Sequence
from importlib import import_module

import torch

from rlhf_core.errors import needs_bitsandbytes


def adam_8bit(
    parameters: Sequence[torch.nn.Parameter], learning_rate: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """Adam whose moments take a quarter of the memory; those of tensors below 4096 numbers stay float32. Raises
    UserError where bitsandbytes is not installed."""
    try:
        kind = import_module("bitsandbytes.optim").Adam8bit
    except ImportError:
        raise needs_bitsandbytes("ppo.optimizer.states: int8", "float32") from None
    optimizer: torch.optim.Optimizer = kind(list(parameters), lr=learning_rate, betas=betas, eps=eps)
    return optimizer
