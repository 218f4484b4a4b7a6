"""Activation checkpointing (Chen et al. 2016): activations of a layer are recomputed in the backward pass instead of
kept."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedModel

from rlhf_core.config.precision import Recomputed
from rlhf_core.errors import UserError


@contextmanager
def recomputing(models: Sequence[PreTrainedModel], layers: Recomputed) -> Iterator[None]:
    """In this context the activations of these layers are recomputed: of none (False), of every layer (True), of every
    n-th layer (n). Gradients stay the same. Raises UserError for an architecture that does not support it.

    Transformers does so in training mode only; dropout stays off, since its rates are 0.
    """
    if layers is False:
        yield
        return
    modes = [model.training for model in models]
    for model in models:
        try:
            model.activation_checkpointing_enable(**({} if layers is True else {"every_n_layers": layers}))
        except ValueError as error:
            raise UserError(f"gradient_checkpointing: {error}; set it to false") from None
        model.train()
    try:
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.activation_checkpointing_disable()
            model.train(mode)
