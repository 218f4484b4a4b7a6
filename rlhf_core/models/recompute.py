"""Activation checkpointing (Chen et al. 2016): activations of a layer are recomputed in the backward pass instead of
kept."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import signature
from typing import Any

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
            options: dict[str, Any] = {"use_reentrant": False}
            if contexts is not None:
                options["context_fn"] = partial(contexts, model)
            _enable(model, options, every_n_layers=1 if layers is True else layers)
        except ValueError as error:
            raise UserError(f"gradient_checkpointing: {error}; set it to false") from None
        model.train()
    try:
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            _method(model, "disable")()
            model.train(mode)


def _method(model: PreTrainedModel, name: str) -> Callable[..., None]:
    """`activation_checkpointing_<name>`, which is `gradient_checkpointing_<name>` before transformers 5.23."""
    found: Callable[..., None] | None = getattr(model, f"activation_checkpointing_{name}", None)
    return found or getattr(model, f"gradient_checkpointing_{name}")


def _enable(model: PreTrainedModel, options: dict[str, Any], every_n_layers: int) -> None:
    """Raises UserError for every n-th layer where transformers has every layer only."""
    enable = _method(model, "enable")
    if "every_n_layers" in signature(enable).parameters:
        enable(options, every_n_layers=every_n_layers)
    elif every_n_layers == 1:
        enable(options)
    else:
        raise UserError(
            f"gradient_checkpointing: {every_n_layers} (every n-th layer) needs transformers >= 5.23; set it to true"
        )
