"""Scalar models (reward model, critic) as adapters on the frozen body of a language model: one body in memory for all.
The reward model's adapter is saved beside the model that it was merged into."""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from rlhf_core import files
from rlhf_core.config.lora import LoraSettings
from rlhf_core.models.hf import fresh_head, save_weights, scalar_model_of
from rlhf_core.models.lora import Adapter, activate, active, active_adapters, add_lora
from rlhf_core.models.packed import can_pack
from rlhf_core.models.quantised import is_quantised

WEIGHTS, SETTINGS = "lora.safetensors", "lora.json"
"""Files of a saved adapter, in the folder of the model that it was merged into."""


class AdaptedBody(nn.Module):
    """The body of a language model, computed with one of its adapters alone."""

    def __init__(self, body: PreTrainedModel, name: str) -> None:
        super().__init__()
        self.adapted, self.name = body, name

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """The body's output with the adapter."""
        with active(self.adapted, [self.name]):
            return self.adapted(*arguments, **options)

    def get_input_embeddings(self) -> nn.Module:
        """Those of the body."""
        embeddings: nn.Module = self.adapted.get_input_embeddings()
        return embeddings


def add_scalar_adapter(
    policy: PreTrainedModel, head: nn.Linear, settings: LoraSettings, seed: int, name: str
) -> Adapter:
    """A new adapter on the policy's body, of a scalar model with that body and the given head: `adapter.model`, which
    computes with this adapter whichever is active. The policy's own active adapters stay active. Raises as
    `add_lora`."""
    can_pack(policy)  # decides the body's attention function, which the scalar model's configuration has to name, too
    before = active_adapters(policy)
    model = scalar_model_of(policy, head)
    setattr(model, model.base_model_prefix, AdaptedBody(getattr(policy, policy.base_model_prefix), name))
    adapter = add_lora(model, settings, seed, name)
    activate(policy, before)
    return adapter


def shares_body(model: PreTrainedModel) -> bool:
    """Whether the model's body is that of another model."""
    return isinstance(getattr(model, model.base_model_prefix), AdaptedBody)


def merged_scalar_model(adapter: Adapter) -> PreTrainedModel:
    """The scalar model of an adapter, merged into its weights. No other model of a shared body can be used afterwards:
    the body is not copied."""
    model = adapter.merge()
    if shares_body(model):
        setattr(model, model.base_model_prefix, getattr(model, model.base_model_prefix).adapted)
    return model


def recompute_with(model: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of activation checkpointing, for the forward pass and its repetition in the backward pass, when another
    adapter may be active."""
    return nullcontext(), active(model, active_adapters(model))


def has_adapter(folder: Path) -> bool:
    """Whether there is an adapter in the folder of a model."""
    return (folder / SETTINGS).is_file()


def fits(folder: Path, body: PreTrainedModel) -> bool:
    """Whether there is an adapter in the folder of a model that was trained above weights like the body's: in 4 bits
    both, or neither."""
    return has_adapter(folder) and (_settings(folder).quantize == "nf4") == is_quantised(body)


def _settings(folder: Path) -> LoraSettings:
    return LoraSettings.model_validate(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))


def read_adapter(folder: Path, policy: PreTrainedModel, name: str, trainable: bool = False) -> Adapter:
    """The adapter in the folder of a scalar model, on the policy's body. Raises UserError where it does not fit the
    body."""
    adapter = add_scalar_adapter(policy, fresh_head(policy), _settings(folder), 0, name)
    adapter.load_state_dict(load_file(folder / WEIGHTS))
    for parameter in adapter.parameters():
        parameter.requires_grad_(trainable)
    return adapter


def save_adapter(folder: Path, adapter: Adapter, settings: LoraSettings) -> None:
    """Write an adapter, and a scalar model's head, beside the model that it is merged into."""
    save_weights(folder / WEIGHTS, adapter.state_dict())
    with files.atomic(folder / SETTINGS) as place:
        place.write_text(json.dumps(settings.model_dump(), indent=2) + "\n", encoding="utf-8")
