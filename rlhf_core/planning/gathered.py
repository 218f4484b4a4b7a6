"""Bytes of weights that a process gathers where a model is divided over processes, counted from its parameters."""

from collections.abc import Iterable

from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models.sharding import layers_of
from rlhf_core.planning.shapes import Shapes

LAYERS_AT_ONCE = 2
"""FSDP gathers a layer while the one before it computes."""
BFLOAT16, FLOAT32 = 2, 4
"""Bytes of a number."""


def whole_bytes(shapes: Shapes, model: PreTrainedModel) -> int:
    """Of all weights, as while the model samples or scores: those of the layers in the precision of the run, the others
    in their own."""
    root, layers = _root_and_layers(shapes, model)
    return _bytes(root) + sum(layers)


def pass_bytes(shapes: Shapes, model: PreTrainedModel, trains: bool) -> int:
    """Of a pass, at most: the weights outside the layers (embeddings, last norm, output layer) and two layers. If it
    `trains`, also the gradients of the first and of one layer, which are whole until they are added up, and the float32
    copy of a layer's gradients that is sent."""
    root, layers = _root_and_layers(shapes, model)
    found = _bytes(root) + LAYERS_AT_ONCE * max(layers)
    if not trains:
        return found
    whole = _bytes(p for p in root if p.requires_grad)
    numbers = max(sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers_of(model))
    return found + whole + numbers * (_size(shapes) + FLOAT32)


def _root_and_layers(shapes: Shapes, model: PreTrainedModel) -> tuple[list[Tensor], list[int]]:
    """The parameters outside the layers, and the bytes of each layer."""
    layers = [list(layer.parameters()) for layer in layers_of(model)]
    inside = {p for layer in layers for p in layer}
    sizes = [sum(p.numel() for p in layer) * _size(shapes) for layer in layers]
    return [p for p in model.parameters() if p not in inside], sizes


def _size(shapes: Shapes) -> int:
    """Bytes of a number in a layer."""
    return BFLOAT16 if shapes.precision == "bfloat16" else FLOAT32


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
