"""How a stage loads reward models and critics: as models of their own, or as adapters on the SFT model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.precision import Frozen, Precision
from rlhf_core.models.hf import (
    Log,
    default_device,
    draw_head,
    fresh_head,
    last_layer,
    load_classifier,
    load_scalar_model,
    place,
    scalar_model_from,
)
from rlhf_core.models.lora import Adapter
from rlhf_core.models.precision import body_precision, keep_float32
from rlhf_core.models.shared_body import add_scalar_adapter, fits, read_adapter

CRITIC = "critic"
"""The name of the critic's adapter."""


def unchanged(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself."""
    return model


@dataclass(frozen=True)
class ScalarModels:
    """Loads scalar models. With `body`, the SFT model, those that were trained as adapters above such weights (in 4
    bits or not) are adapters on it."""

    trusted: bool = False
    precision: Precision = "float32"
    """Of frozen weights."""
    device: torch.device | None = None
    """None: the GPU if there is one, else the CPU."""
    body: PreTrainedModel | None = None
    ready: Callable[[PreTrainedModel], PreTrainedModel] = unchanged
    """Called with each reward model for inference once it is loaded, before the next one is."""
    log: Log = print
    """See `load_causal_lm`."""

    def _where(self, frozen: Frozen) -> dict[str, Any]:
        """The options with which models are loaded."""
        device = self.device or default_device()
        return {"trust_remote_code": self.trusted, "frozen": frozen, "device": device, "log": self.log}

    def frozen(self, folder: Path) -> PreTrainedModel:
        """The reward model in the folder, for inference."""
        if self.body is not None and fits(folder, self.body):
            return read_adapter(folder, self.body, "_".join(folder.parts[-2:])).model
        model = load_scalar_model(folder, **self._where(self.precision))
        return self.ready(place(model, self.device or default_device()))

    def classifier(self, folder: Path, precision: Precision | None) -> PreTrainedModel:
        """A model from elsewhere, for inference, whole on the default device: in its own precision, None: that of the
        run. Its outputs are computed in float32."""
        device, frozen = default_device(), precision or self.precision
        model = load_classifier(folder, **self._where(frozen) | {"device": device})
        model.config.use_cache = False  # of keys and values, which nothing reads again
        if (layer := last_layer(model)) is not None:
            keep_float32(layer)
        return place(model, device)

    def critic_from_reward(self, folder: Path, lora: LoraSettings | None) -> PreTrainedModel | Adapter:
        """The reward model in the folder, as a critic to be trained with these adapters."""
        if self.body is not None and lora is not None and fits(folder, self.body):
            return read_adapter(folder, self.body, CRITIC, trainable=True)
        return load_scalar_model(folder, **self._where(body_precision(self.precision, lora)))

    def critic_from_sft(self, folder: Path, lora: LoraSettings | None, seed: int) -> PreTrainedModel | Adapter:
        """The SFT model in the folder under a new head, as a critic to be trained with these adapters."""
        if self.body is not None and lora is not None:
            head = fresh_head(self.body)
            draw_head(head, seed)
            return add_scalar_adapter(self.body, head, lora, seed, CRITIC)
        return scalar_model_from(folder, seed, **self._where(body_precision(self.precision, lora)))
