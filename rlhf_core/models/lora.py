"""LoRA adapters (Hu et al. 2021) of `peft` in a Hugging Face model, which stays a plain transformers model."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_core.config.lora import LoraSettings
from rlhf_core.errors import UserError

if TYPE_CHECKING:  # importing peft takes seconds
    from peft.tuners.lora import LoraLayer, LoraModel

NAME = "default"
"""peft's name of a model's only adapter."""


def add_lora(model: PreTrainedModel, settings: LoraSettings, seed: int) -> "Adapter":
    """Add adapters to `model`, in place, and freeze everything else but a scalar model's `score` head.

    The outputs are those of the model without adapters, to the bit (B = 0). Equal seeds give equal adapters; the global
    random state does not change. Raises UserError for target modules that the model's body does not have, ValueError
    for a model that has adapters already.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    if _layers(model):
        raise ValueError("the model has LoRA adapters already; merge them first")
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    targets = _targets(model, settings.target_modules)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(targets),
        fan_in_fan_out=all(isinstance(layer, Conv1D) for layer in targets.values()),
    )
    with torch.random.fork_rng():
        tuner = LoraModel(model, config, NAME)
    del model.peft_config
    model.train(model.training)
    _initialise(model, seed)
    if (head := getattr(model, "score", None)) is not None:
        head.requires_grad_(True)
    return Adapter(tuner, flags)


class Adapter:
    """The adapters of one model, and that model's other trainable parameters (the scalar head's). After `merge` every
    method raises ValueError."""

    def __init__(self, tuner: "LoraModel", flags: Mapping[torch.nn.Parameter, bool]) -> None:
        self._tuner = tuner
        self.model: PreTrainedModel = tuner.model
        named = dict(self.model.named_parameters())
        self._trained = {name for name, parameter in named.items() if parameter.requires_grad}
        self._flags = {name: flags[parameter] for name, parameter in named.items() if parameter in flags}

    @property
    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        """By name: parameters become other objects where a model is divided over processes."""
        return {name: p for name, p in self.model.named_parameters() if name in self._trained}

    @contextmanager
    def off(self) -> Iterator[PreTrainedModel]:
        """The model without its adapters: bit for bit the frozen model before `add_lora`. May be nested."""
        on = not self._present()[0].disable_adapters
        flags = [(parameter, parameter.requires_grad) for parameter in self._trainable.values()]
        try:
            self._tuner.disable_adapter_layers()
            _restore(flags)  # a divided model takes the flags of its whole weights from here, once
            yield self.model
        finally:
            if on:
                self._tuner.enable_adapter_layers()
            _restore(flags)

    def merge(self) -> PreTrainedModel:
        """Merge the adapters into the weights, W + (alpha / rank)·B·A, in place, and return the model: the same object,
        plain again, its parameters trainable as before `add_lora`. Adapters and base cannot be separated afterwards;
        take `state_dict` before if either is still needed."""
        self._present()
        flags = [(p, self._flags[name]) for name, p in self.model.named_parameters() if name in self._flags]
        self._tuner.merge_and_unload()
        _restore(flags)
        return self.model

    def state_dict(self) -> dict[str, Tensor]:
        """The adapters' parameters and the scalar head's by name; not copies, as with torch's modules."""
        self._present()
        return {name: parameter.detach() for name, parameter in self._trainable.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a `state_dict`. Raises UserError when it comes from other settings or another model."""
        self._present()
        shapes = {name: parameter.shape for name, parameter in self._trainable.items()}
        if {name: tensor.shape for name, tensor in state.items()} != shapes:
            raise UserError("the saved adapter has other layers or another rank than `lora`; use its settings")
        for name, parameter in self._trainable.items():
            parameter.copy_(state[name])

    def _present(self) -> list["LoraLayer"]:
        layers = list(_layers(self.model).values())
        if not layers:
            raise ValueError("the adapter was merged into its model")
        return layers


def _restore(flags: Iterable[tuple[torch.nn.Parameter, bool]]) -> None:
    """Undo peft's switch, which freezes and unfreezes parameters."""
    for parameter, flag in flags:
        parameter.requires_grad_(flag)


def _layers(model: PreTrainedModel) -> dict[str, "LoraLayer"]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _targets(model: PreTrainedModel, wanted: str | list[str]) -> dict[str, torch.nn.Module]:
    """The linear layers of the model's body by name, without output layer and scalar head."""
    prefix = f"{model.base_model_prefix}."
    linear = {
        name: module
        for name, module in model.named_modules()
        if name.startswith(prefix) and isinstance(module, torch.nn.Linear | Conv1D)
    }
    if isinstance(wanted, str):
        return linear
    chosen = {name: module for name, module in linear.items() if any(f".{name}".endswith(f".{w}") for w in wanted)}
    missing = [w for w in wanted if not any(f".{name}".endswith(f".{w}") for name in linear)]
    if missing:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise UserError(
            f"lora.target_modules: {type(model).__name__} has no layer {', '.join(missing)}; it has {known}"
        )
    return chosen


@torch.no_grad()
def _initialise(model: PreTrainedModel, seed: int) -> None:
    """A uniform in ±1/√d_in (He et al. 2015 with a = √5, as in the paper's code), B zero; drawn on the CPU, so that all
    devices get equal values."""
    generator = torch.Generator().manual_seed(seed)
    for layer in _layers(model).values():
        a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        a.copy_((2 * torch.rand(a.shape, generator=generator) - 1) / a.shape[1] ** 0.5)
        b.zero_()
