"""Computing in bfloat16: weights of frozen models, matrix products of trained ones, and heads that stay float32."""

from contextlib import AbstractContextManager
from types import MethodType

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.precision import Frozen, Precision

KEPT = "_leash_float32"
"""The attribute of a layer with the float32 copy of its weight."""


def frozen_dtype(frozen: Frozen) -> torch.dtype:
    """Of the weights of a model that is not trained (those not in 4 bits). A trained one has float32 weights in every
    precision: Adam's steps are smaller than the spacing of bfloat16 numbers."""
    return torch.float32 if frozen == "float32" else torch.bfloat16


def body_precision(precision: Precision, lora: LoraSettings | None) -> Frozen:
    """Of the weights of a trained model: with adapters they are frozen."""
    if lora is None:
        return "float32"
    return "nf4" if lora.quantize == "nf4" else precision


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """In this context matrix products are computed in bfloat16 with `precision: bfloat16`; weights stay as they are
    (rule 24)."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


def round_products(model: PreTrainedModel) -> None:
    """Round the weights of the body's linear layers to bfloat16, in place; everything else stays float32. Under
    autocast, and only there, the model computes what it did before, to the bit: the residual stream is float32, as in
    a trained model. Half the memory, and no cast of the weights in each pass."""
    for layer in model.base_model.modules():
        if isinstance(layer, torch.nn.Linear | Conv1D) and layer.weight.dtype == torch.float32:
            layer.bfloat16()


def keep_float32(head: torch.nn.Module) -> None:
    """Make a linear head compute in float32, whatever its weights and its input are, also under autocast: eight
    significant bits are too few for logits and values."""
    head.forward = MethodType(_linear_in_float32, head)  # bound, so that a copy of the model computes with its own


def is_exact(forward: object) -> bool:
    """Whether this attribute of a linear layer, None where there is none, computes its plain product."""
    return forward is None or getattr(forward, "__func__", None) is _linear_in_float32


def float32_weight(layer: torch.nn.Linear) -> Float[Tensor, "out in"]:
    """The layer's weight in float32. Where no gradient is recorded, the copy of one in bfloat16 is kept in the layer
    until the weight changes: at every decoded token a cast of a large head takes longer than the rest of the model."""
    weight = layer.weight
    if weight.dtype != torch.bfloat16 or (weight.requires_grad and torch.is_grad_enabled()):
        return weight.float()
    state = weight.data_ptr(), weight._version, weight.device
    kept = vars(layer).get(KEPT)
    if kept is None or kept[0] != state:
        kept = vars(layer)[KEPT] = state, weight.detach().float()
    copy: Tensor = kept[1]
    return copy


def _linear_in_float32(head: torch.nn.Linear, hidden: Float[Tensor, "*shape hidden"]) -> Float[Tensor, "*shape out"]:
    with torch.autocast(hidden.device.type, enabled=False):
        return linear(hidden.float(), float32_weight(head), None if head.bias is None else head.bias.float())
