"""LoRA adapters (Hu et al. 2021) of `peft` in a Hugging Face model, which stays a plain transformers model. Several
adapters can be on one body, of which one or none is active."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_core.config.lora import LoraSettings
from rlhf_core.errors import UserError
from rlhf_core.models.quantised import is_quantised, merge_into_full
from rlhf_core.models.sharding import is_divided

if TYPE_CHECKING:  # importing peft takes seconds
    from peft.tuners.lora import Linear, LoraLayer, LoraModel

NAME = "default"
"""peft's name of a model's first adapter."""


def add_lora(model: PreTrainedModel, settings: LoraSettings, seed: int, name: str = NAME) -> "Adapter":
    """Add adapters to `model`, in place, freeze everything else but a scalar model's `score` head and the adapters that
    are there already, and make the new ones the active ones.

    The outputs are those of the model without adapters, to the bit (B = 0). Equal seeds give equal adapters; the global
    random state does not change. Raises UserError for target modules that the model's body does not have, ValueError
    for a model that has adapters of this name already, or is divided: FSDP would not add up their gradients.
    """
    from peft import LoraConfig
    from peft.tuners.lora import Linear, LoraModel

    if any(name in layer.lora_A for layer in _layers(model)):
        raise ValueError("the model has LoRA adapters already; merge them first")
    if is_divided(model):
        raise ValueError("the model is divided already; add adapters first")
    others = _adapter_parameters(model)
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
        tuner = LoraModel(model, config, name)
    del model.peft_config
    model.train(model.training)
    for parameter in _adapter_parameters(model, name):
        parameter.data = parameter.data.float()  # peft takes the type of the frozen weights
    for layer in _layers(model):
        if type(layer) is Linear:  # layers in 4 bits keep peft's
            layer.forward = MethodType(_forward, layer)  # bound, so that a copy of the model computes with its own
    _initialise(model, seed, name)
    for parameter in others:
        parameter.requires_grad_(flags[parameter])
    if (head := getattr(model, "score", None)) is not None:
        head.requires_grad_(True)
    return Adapter(tuner, flags, name)


def _forward(layer: "Linear", x: Float[Tensor, "*shape d_in"]) -> Float[Tensor, "*shape d_out"]:
    """x·Wᵀ + (alpha / rank)·x·Aᵀ·Bᵀ as peft computes it, in half as many passes over memory: x is not cast to float32
    and back under autocast, and the adapter's product is added where it is made."""
    result: Tensor = layer.base_layer(x)
    for name in layer.active_adapters:
        if name in layer.lora_A:
            a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
            dtype = result.dtype if torch.is_autocast_enabled(x.device.type) else a.dtype
            small = linear(x.to(dtype), a).flatten(0, -2)
            total = torch.addmm(result.to(dtype).flatten(0, -2), small, b.t(), alpha=layer.scaling[name])
            result = total.view(result.shape).to(result.dtype)
    return result


class Adapter:
    """The adapters of one model, and that model's other trainable parameters (the scalar head's). After `merge` every
    method raises ValueError."""

    def __init__(self, tuner: "LoraModel", flags: Mapping[torch.nn.Parameter, bool], name: str = NAME) -> None:
        self._tuner, self.name = tuner, name
        self.model: PreTrainedModel = tuner.model
        named = dict(self.model.named_parameters())
        self._flags = {place: flags[parameter] for place, parameter in named.items() if parameter in flags}

    @property
    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        """Read at each use: parameters become other objects where a model is divided over processes."""
        own = {*_adapter_parameters(self.model, self.name), *_head_parameters(self.model)}
        return {_name_without(self.name, place): p for place, p in self.model.named_parameters() if p in own}

    def parameters(self) -> list[torch.nn.Parameter]:
        """The adapters' parameters and the scalar head's."""
        return list(self._trainable.values())

    @contextmanager
    def off(self) -> Iterator[PreTrainedModel]:
        """The model without any adapter: bit for bit the frozen model before `add_lora`. May be nested."""
        self._present()
        with active(self.model, ()):
            yield self.model

    def merge(self) -> PreTrainedModel:
        """Merge the adapters into the weights, W + (alpha / rank)·B·A, in place, and return the model: the same object,
        plain again, in float32, without the other adapters of its body, its parameters trainable as before `add_lora`.
        Adapters and base cannot be separated afterwards; take `state_dict` before if either is still needed."""
        self._present()
        self.model.float()  # of frozen bfloat16 weights a sum would be rounded
        flags = [(p, self._flags[name]) for name, p in self.model.named_parameters() if name in self._flags]
        if is_quantised(self.model):
            merge_into_full(self.model, self.name)
        else:
            self._tuner.merge_and_unload(adapter_names=[self.name])
        _restore(flags)
        return self.model

    def merge_on_host(self) -> PreTrainedModel:
        """`merge` on the CPU: in float32 a model may not fit where it was trained. One in 4 bits stays where it is."""
        if not is_quantised(self.model):
            self.model.cpu()
        return self.merge()

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

    def _present(self) -> None:
        if not _layers(self.model):
            raise ValueError("the adapter was merged into its model")


def active_adapters(model: torch.nn.Module) -> list[str]:
    """The names of the adapters that the model computes with."""
    return list(next((layer.active_adapters for layer in _walk(model)), []))


def activate(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Make these the active adapters of the model; which parameters need gradients stays as it is."""
    for layer in _layers(model):
        layer._active_adapter = list(names)  # peft's `set_adapter` freezes parameters, too, also in a graph in use


@contextmanager
def active(model: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """In this context these are the active adapters of the model. Nothing is done where they are already, since it is
    entered in every layer of a backward pass that recomputes activations."""
    before = active_adapters(model)
    if before == list(names):
        yield
        return
    activate(model, names)
    try:
        yield
    finally:
        activate(model, before)


def _name_without(adapter: str, name: str) -> str:
    """A parameter's name as it is in a model with one adapter, which a scalar model with a body of its own has."""
    return name.replace(".adapted.", ".").replace(f".{adapter}.", f".{NAME}.")


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The parameters by the names of the model without adapters, one at a time, adapters added to copies of the weights
    that they change. The model does not change."""
    adapted = _layers(model)
    layers = {f"{name}.base_layer.weight": module for name, module in model.named_modules() if module in adapted}
    for name, parameter in model.named_parameters():
        if any(f".{part}." in name for part in ("lora_A", "lora_B")):
            continue
        layer = layers.get(name)
        weight = parameter.detach()
        yield (
            name.replace(".base_layer.", "."),
            weight if layer is None or NAME not in layer.lora_A else weight + layer.get_delta_weight(NAME),
        )


def _restore(flags: Iterable[tuple[torch.nn.Parameter, bool]]) -> None:
    """Undo peft's switch, which freezes and unfreezes parameters."""
    for parameter, flag in flags:
        parameter.requires_grad_(flag)


def _layers(model: torch.nn.Module) -> "list[LoraLayer]":
    return list(_walk(model))


def _walk(module: torch.nn.Module) -> "Iterator[LoraLayer]":
    """The layers with adapters, without a look at the many modules inside them."""
    from peft.tuners.lora import LoraLayer

    if isinstance(module, LoraLayer):
        yield module
        return
    for child in module.children():
        yield from _walk(child)


def _adapter_parameters(model: PreTrainedModel, name: str | None = None) -> list[torch.nn.Parameter]:
    """Those of the adapter of this name, or of all."""
    parts = [part for layer in _layers(model) for part in (layer.lora_A, layer.lora_B)]
    return [p for part in parts for key, linear in part.items() if name in (None, key) for p in linear.parameters()]


def _head_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    head = getattr(model, "score", None)
    return [] if head is None else list(head.parameters())


def _targets(model: PreTrainedModel, wanted: str | list[str]) -> dict[str, torch.nn.Module]:
    """The linear layers of the model's body by name, without output layer and scalar head."""
    prefix = f"{model.base_model_prefix}."
    named = {name: module for name, module in model.named_modules() if name.startswith(prefix)}
    adapted = {name: layer.get_base_layer() for name, layer in named.items() if layer in _layers(model)}
    plain = {name: m for name, m in named.items() if not any(name.startswith(f"{layer}.") for layer in adapted)}
    linear = {name: m for name, m in {**plain, **adapted}.items() if isinstance(m, torch.nn.Linear | Conv1D)}
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
def _initialise(model: PreTrainedModel, seed: int, name: str) -> None:
    """A uniform in ±1/√d_in (He et al. 2015 with a = √5, as in the paper's code), B zero; drawn on the CPU, so that all
    devices get equal values."""
    generator = torch.Generator().manual_seed(seed)
    for layer in _layers(model):
        if name not in layer.lora_A:
            continue
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        a.copy_((2 * torch.rand(a.shape, generator=generator) - 1) / a.shape[1] ** 0.5)
        b.zero_()
