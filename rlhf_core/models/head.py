"""The output layer of a language model, outside its forward pass: logits of a few tokens at a time, in float32, so that
no tensor of [tokens, vocabulary] is made. No other module touches the weights of an output layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf_core.errors import is_out_of_memory
from rlhf_core.models.precision import float32_weight, is_exact

CHUNK_ON_CPU = 2**24
"""Logits that are computed at once. They are kept for the backward pass where all logits of a pass are one chunk;
otherwise they are computed again."""
CHUNK_ON_ACCELERATOR = 2**26
PROBED = 40.0
"""The largest logit with which an architecture's last step is examined: far above the soft caps in use."""


@dataclass(frozen=True)
class LastStep:
    """What an architecture does with the outputs z of its output layer: c·tanh(s·z / c), or s·z without a cap."""

    scale: float = 1.0
    """s"""
    cap: float | None = None
    """c"""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "LastStep":
        """The last step that a model's configuration describes."""
        found = config.get_text_config().to_dict()
        scales = [found.get(key) or 1.0 for key in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
        scale = torch.tensor(scales, dtype=torch.float64).prod().item() / (found.get("logits_scaling") or 1.0)
        return cls(scale, found.get("final_logit_softcapping") or found.get("logits_soft_cap"))

    def __call__(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The logits."""
        scaled = z if self.scale == 1 else z * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap

    def slope(self, logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"] | float:
        """The derivative of the logits by z."""
        return self.scale if self.cap is None else self.scale * (1 - (logits / self.cap) ** 2)


@dataclass(frozen=True, eq=False)
class Head:
    """An output layer: logits = step(hidden · weightᵀ + bias), in float32 (float64 for float64 inputs), also under
    autocast. Without `weight` the hidden states are the logits."""

    weight: Float[Tensor, "vocabulary hidden"] | None = None
    bias: Float[Tensor, "vocabulary"] | None = None
    step: LastStep = LastStep()

    @classmethod
    def of(cls, layer: nn.Linear, step: LastStep) -> "Head":
        """The head of a model's output layer. The only reader of its parameters."""
        weight = float32_weight(layer) if layer.weight.dtype == torch.bfloat16 else layer.weight
        return cls(weight, layer.bias, step)

    def exact(self, hidden: Tensor) -> "Head":
        """The head in the precision of its logits."""
        precision = self.precision(hidden)
        weight, bias = (None if part is None else part.to(precision) for part in (self.weight, self.bias))
        return replace(self, weight=weight, bias=bias)

    def precision(self, hidden: Tensor) -> torch.dtype:
        """The type of the logits."""
        found = hidden.dtype if self.weight is None else torch.promote_types(hidden.dtype, self.weight.dtype)
        return torch.promote_types(found, torch.float32)

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocabulary"]:
        """Logits, with gradient where one is recorded."""
        head, hidden = self.exact(hidden), hidden.to(self.precision(hidden))
        if head.weight is None:
            return hidden
        with torch.autocast(hidden.device.type, enabled=False):
            return head.step(nn.functional.linear(hidden, head.weight, head.bias))

    def chunks(self, hidden: Float[Tensor, "tokens hidden"]) -> list[slice]:
        """The tokens in groups of at most a chunk's logits."""
        width = hidden.shape[1] if self.weight is None else self.weight.shape[0]
        size = max(1, (CHUNK_ON_CPU if hidden.device.type == "cpu" else CHUNK_ON_ACCELERATOR) // max(1, width))
        return [slice(start, start + size) for start in range(0, max(1, len(hidden)), size)]


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model predicts at some positions: their last hidden states, and the output layer that makes logits of
    them. Valid until the layer's weights change."""

    hidden: Float[Tensor, "*tokens hidden"]
    """What `head` reads: the last hidden states, or the logits themselves."""
    head: Head = Head()
    states: Float[Tensor, "*tokens hidden"] | None = None
    """The last hidden states; None where only logits are known."""

    def logits(self) -> Float[Tensor, "tokens vocabulary"]:
        """All logits, with gradient; for few tokens."""
        return self.head.logits(self.hidden)

    def at(self, tokens: Any) -> "Predictions":
        """Those of some tokens, by any index of the first dimension."""
        return replace(self, hidden=self.hidden[tokens], states=None if self.states is None else self.states[tokens])


def read(model: PreTrainedModel, keep: Int[Tensor, "kept"], inputs: dict[str, Any]) -> Predictions:
    """One forward pass: the predictions of each row at the columns `keep`, [rows, kept, hidden]. Where the model's
    logits are not those of its output layer and a known last step, they are its own logits."""
    way = _way(model)
    if way.step is None:
        output = model(**inputs, logits_to_keep=keep, use_cache=False, output_hidden_states=True)
        states = output.hidden_states[-1][:, keep] if output.hidden_states else None
        return Predictions(output.logits if way.selects else output.logits[:, keep], states=states)
    layer, found = model.get_output_embeddings(), []

    def record(hidden: Tensor) -> Tensor:
        found.append(hidden)
        return hidden[..., :0]

    with _computing(layer, record):
        model(**inputs, logits_to_keep=keep, use_cache=False)
    hidden = found[0] if way.selects else found[0][:, keep]
    return Predictions(hidden, Head.of(layer, way.step), hidden)


def examine(model: PreTrainedModel) -> None:
    """Decide how the model's logits are read, by one pass, unless that is decided; else the first `read` does it."""
    if model.get_output_embeddings() is not None:
        _way(model)


@dataclass(frozen=True)
class _Way:
    """How a model's logits are read."""

    step: LastStep | None
    """None: from its own forward pass."""
    selects: bool
    """Whether the model computes logits of the wanted positions only; some custom ones ignore `logits_to_keep`."""


_decided: WeakKeyDictionary[PreTrainedModel, _Way] = WeakKeyDictionary()


def _way(model: PreTrainedModel) -> _Way:
    """Decided once per model, by one pass over a short sequence, in which its output layer returns given numbers: so
    neither its weights nor zeros among them matter."""
    if model not in _decided:
        _decided[model] = _examine(model)
    return _decided[model]


@torch.no_grad()
def _examine(model: PreTrainedModel) -> _Way:
    layer, calls = model.get_output_embeddings(), []
    embedding = model.get_input_embeddings()
    vocabulary, device = embedding.num_embeddings, embedding.weight.device
    ids, keep = torch.arange(4, device=device)[None] % vocabulary, torch.tensor([1, 2], device=device)

    def given(hidden: Tensor) -> Tensor:
        calls.append(torch.linspace(-PROBED, PROBED, len(layer.weight), device=device).to(hidden.dtype))
        return calls[0].expand(*hidden.shape[:-1], -1)

    try:
        with torch.autocast(device.type, enabled=False):
            if not _is_plain(layer):
                return _Way(None, model(input_ids=ids, logits_to_keep=keep, use_cache=False).logits.shape[1] == 2)
            with _computing(layer, given):
                logits = model(input_ids=ids, logits_to_keep=keep, use_cache=False).logits
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):  # says nothing about the architecture
            raise
        return _Way(None, False)
    step = LastStep.of(model.config)
    fits = len(calls) == 1 and logits.shape[-1] == len(layer.weight)
    tolerance = 16 * torch.finfo(logits.dtype).eps * PROBED
    known = fits and bool(((logits - step(calls[0].float())).abs() <= tolerance).all())
    return _Way(step if known else None, logits.shape[1] == 2)


def _is_plain(layer: nn.Module | None) -> bool:
    """Whether the layer is a product with its weight: not quantised, wrapped or moved between devices at each call."""
    own = vars(layer).get("forward") if isinstance(layer, nn.Linear) else None
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward and is_exact(own)


@contextmanager
def _computing(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """In this context the layer's forward pass is `forward`; its hooks run as ever."""
    own = vars(layer).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own
