"""Models of a configuration without their weights, and token ids of wanted lengths to run them on."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from rlhf_core.config.base import ScratchConfig
from rlhf_core.config.precision import Frozen, Precision
from rlhf_core.errors import UserError
from rlhf_core.models import batching, head, token_logprobs
from rlhf_core.models.hf import build_llama, scalar_head, without_dropout
from rlhf_core.models.precision import frozen_dtype, keep_float32
from rlhf_core.models.sampling import require_cache
from rlhf_core.planning.ledger import without_data

LIMITS = (
    (batching, "TOKENS_ON_CPU", "TOKENS_ON_ACCELERATOR"),
    (head, "CHUNK_ON_CPU", "CHUNK_ON_ACCELERATOR"),
    (token_logprobs, "PIECE_ON_CPU", "PIECE_ON_ACCELERATOR"),
)
"""Limits of a pass that differ between the CPU and an accelerator: module, and the names of the two constants."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configurations."""


class Shapes:
    """Makes models of one configuration whose tensors have no data.

    Args:
        config: of the base model.
        trust_remote_code: whether Python code of the folder may run.
        precision: of matrix products, and of frozen weights.
    """

    def __init__(
        self, config: PreTrainedConfig, trust_remote_code: bool = False, precision: Precision = "float32"
    ) -> None:
        self.precision: Precision = precision
        self.config, self.mode, self._trusted = (
            without_dropout(copy.deepcopy(config)),
            without_data(),
            trust_remote_code,
        )

    @property
    def vocabulary(self) -> int:
        """The width of the logits."""
        return int(self.config.get_text_config().vocab_size)

    def in_precision(self, precision: Precision) -> "Shapes":
        """The same models in another precision."""
        return Shapes(self.config, self._trusted, precision)

    def causal_lm(self, frozen: Frozen = "float32") -> PreTrainedModel:
        """A causal language model, as `load_causal_lm` loads it."""
        model = self._build(AutoModelForCausalLM, frozen)
        if frozen != "float32":
            keep_float32(model.get_output_embeddings())
        return model

    def scalar_model(self, frozen: Frozen = "float32") -> PreTrainedModel:
        """A reward model or critic, as `load_scalar_model` loads it."""
        model = self._build(AutoModelForSequenceClassification, frozen, num_labels=1)
        with self.mode:
            layer = scalar_head(model)
            layer.weight = nn.Parameter(layer.weight.detach().float())
        return model

    def _build(self, kind: Any, frozen: Frozen, **changes: Any) -> PreTrainedModel:
        if frozen == "nf4":
            raise UserError(
                "lora.quantize: nf4 is not planned; plan with none: 4 bits take a quarter of the body's bfloat16 bytes"
            )
        config = copy.deepcopy(self.config)
        for name, value in changes.items():
            setattr(config, name, value)
        try:
            with self.mode:
                model: PreTrainedModel = kind.from_config(
                    config, dtype=frozen_dtype(frozen), trust_remote_code=self._trusted
                )
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            raise UserError(f"{config.model_type}: transformers has no {kind.__name__} for this architecture") from None
        return model.eval()


def require_plannable(shapes: Shapes) -> None:
    """Raise UserError for an architecture that is no causal language model, whose layers are no attention, or which has
    experts: which of them a token takes depends on weights."""
    settings = shapes.config.get_text_config().to_dict()
    if any((settings.get(key) or 0) > 1 for key in EXPERTS):
        raise UserError(
            f"{shapes.config.model_type}: has experts, which cannot be planned, because the weights choose them; plan "
            "a model without experts"
        )
    require_cache(shapes.causal_lm())


class _TwoSpecialTokens:
    """What `build_llama` reads of a tokenizer."""

    pad_token_id, eos_token_id = 0, 1

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


def scratch_config(scratch: ScratchConfig) -> PreTrainedConfig:
    """The configuration of a model from scratch, with the largest vocabulary that its settings allow."""
    with without_data(), torch.random.fork_rng():
        return build_llama(scratch, _TwoSpecialTokens(scratch.vocabulary), 0).config


def rows_of(rows: int, length: int, vocabulary: int) -> list[list[int]]:
    """Sequences of token ids [rows][length] without a common prefix."""
    return [[(row + place) % vocabulary for place in range(length)] for row in range(rows)]


def parameters_of(models: Sequence[nn.Module]) -> int:
    """The number of distinct parameters."""
    return sum(p.numel() for p in {p for model in models for p in model.parameters()})


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` for parameters without data, which torch cannot exchange in place."""
    for child in module.children() if recurse else ():
        child._apply(function)  # type: ignore[no-untyped-call]
    for name, parameter in module._parameters.items():
        if parameter is not None and (new := function(parameter)) is not parameter:
            module._parameters[name] = nn.Parameter(new.detach(), parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


@contextmanager
def planned_for(accelerator: bool) -> Iterator[None]:
    """In this context the stages' code computes on the CPU, in passes of the size that they have on an accelerator, or
    else on the CPU."""
    changes: list[tuple[Any, str, Any]] = [(torch.cuda, "is_available", lambda: False), (nn.Module, "_apply", _apply)]
    if accelerator:
        changes += [(module, name, getattr(module, other)) for module, name, other in LIMITS]
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    for place, name, value in changes:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
