"""Activation checkpointing (Chen et al. 2016): activations of a layer are recomputed in the backward pass instead of
kept."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from transformers import PreTrainedModel

from rlhf_core.config.precision import Recomputed
from rlhf_core.errors import UserError

Contexts = Callable[[PreTrainedModel], tuple[AbstractContextManager[None], AbstractContextManager[None]]]


@contextmanager
def recomputing(
    models: Sequence[PreTrainedModel], layers: Recomputed, contexts: Contexts | None = None
) -> Iterator[None]:
    """In this context the activations of these layers are recomputed: of none (False), of every layer (True), of every
    n-th layer (n). Gradients stay the same. Raises UserError for an architecture that does not support it.

    `contexts(model)` returns two contexts for a layer's pass and for its repetition.

    Transformers does so in training mode only; dropout stays off, since its rates are 0.
    """
    if layers is False:
        yield
        return
    modes = [model.training for model in models]
    for model in models:
        try:
            options = {"use_reentrant": False} | ({} if contexts is None else {"context_fn": partial(contexts, model)})
            model.activation_checkpointing_enable(options, every_n_layers=int(layers))
        except ValueError as error:
            raise UserError(f"gradient_checkpointing: {error}; set it to false") from None
        model.train()
    try:
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.activation_checkpointing_disable()
            model.train(mode)
