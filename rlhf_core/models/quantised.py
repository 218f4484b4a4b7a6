"""Frozen weights in 4 bits below adapters: QLoRA (Dettmers et al. 2023), with the NF4 layers of `bitsandbytes`, which
is optional."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import dequantize_bnb_weight
from transformers.quantizers.base import HfQuantizer

from rlhf_core.errors import needs_bitsandbytes

KIND = "Linear4bit"
"""The class name of the layers of bitsandbytes; peft's layers around them have the same."""

if not hasattr(HfQuantizer, "remove_quantization_config"):
    raise ImportError(
        "transformers: HfQuantizer has no remove_quantization_config; install a version that pyproject.toml allows"
    )


def nf4_options() -> dict[str, Any]:
    """Options of `from_pretrained` for linear layers in NF4 with quantised constants, products in bfloat16. Raises
    UserError where bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        raise needs_bitsandbytes("lora.quantize: nf4", "none")
    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    }


def detach_quantizer(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its 4-bit layers, and without transformers' record of how they came about: the Trainer refuses
    such models unless their adapters are peft's own wrapper, and the configuration would be saved."""
    model.hf_quantizer.remove_quantization_config(model)
    for layer in model.modules():
        if type(layer).__name__ == KIND:
            layer.support_avx512bf16_for_cpu = False  # else it changes its weights' format, and numbers, at inference
    return model


def is_quantised(module: nn.Module) -> bool:
    """Whether a layer, or any layer of a model, has 4-bit weights."""
    return any(type(part).__name__ == KIND and hasattr(part, "weight") for part in module.modules())


def dequantised(layer: nn.Linear) -> nn.Linear:
    """A plain float32 layer with the numbers that a 4-bit layer computes with; another layer unchanged."""
    if not is_quantised(layer):
        return layer
    weight = dequantize_bnb_weight(layer.weight, state=getattr(layer.weight, "quant_state", None)).float()
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = None if layer.bias is None else nn.Parameter(layer.bias.float(), requires_grad=False)
    return plain


@torch.no_grad()
def merge_into_full(model: PreTrainedModel, name: str) -> None:
    """Replace all 4-bit layers by plain float32 ones, in place, with the adapter of this name merged into them: the sum
    rounded to 4 bits would lose most of the adapter."""
    from peft.tuners.lora import LoraLayer

    parents = [(parent, key, child) for parent in model.modules() for key, child in parent.named_children()]
    for parent, key, child in parents:
        if isinstance(parent, LoraLayer):
            continue
        if isinstance(child, LoraLayer):
            layer = dequantised(child.get_base_layer())
            if name in child.lora_A:
                layer.weight += child.get_delta_weight(name).to(layer.weight)
            setattr(parent, key, layer)
        elif type(child).__name__ == KIND:
            setattr(parent, key, dequantised(child))
