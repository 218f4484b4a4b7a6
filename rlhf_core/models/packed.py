"""Forward passes without padding: the tokens of all sequences as one row, in which every distinct prefix occurs once.
Only attention runs per sequence. No other module depends on how transformers calls attention functions and masks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_core.errors import is_out_of_memory

ATTENTION = "leash_packed"
"""The name of `attention` among the attention functions of transformers."""
LONGEST_TO_SHORTEST = 1.5
"""Sequences that attend in one call differ at most by this factor in length."""
LONGEST_AS_PRODUCTS = 384
"""Up to this length, in tokens, `_Attention` has the faster backward pass under autocast on a CPU."""
EXACT, ROUNDED = 1e-4, 0.1
"""Largest relative difference between packed and plain hidden states in float32, and with fewer bits: bfloat16 rounds
by 0.4%, more after many layers; attention to other tokens changes them by more than half."""
UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments of an attention function that change its result, other than masks."""


@dataclass(frozen=True, eq=False)
class Packed:
    """The prefix tree of some sequences. A node is a token behind the tokens before it; equal prefixes share nodes."""

    input_ids: Int[Tensor, "nodes"]
    position_ids: Int[Tensor, "nodes"]
    nodes: Int[Tensor, "rows longest"]
    """The node of each token of each sequence; behind the end of a sequence any node."""
    calls: list[Int[Tensor, "sequences width"]]
    """The nodes of sequences of similar length, for one call of attention each."""
    slots: Int[Tensor, "nodes"]
    """The place of each node among the outputs of all calls."""

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> "Packed":
        """The tree of sequences of token ids, of which at least one is not empty."""
        order = sorted(range(len(sequences)), key=lambda row: list(sequences[row]))
        longest = max(map(len, sequences))
        ids = torch.tensor([[*sequences[row], *[-1] * (longest - len(sequences[row]))] for row in order])
        real = ids >= 0
        new = real.clone()  # a sequence shares a prefix with another one exactly if it shares it with its neighbour
        new[1:] &= (ids[1:] != ids[:-1]).cumsum(dim=1) > 0
        numbers = new.view(-1).cumsum(dim=0).view(new.shape) - 1
        nodes = torch.where(new, numbers, 0).cummax(dim=0).values
        calls, slots = _calls(nodes, new, real.sum(dim=1).tolist())
        places = torch.empty(len(order), dtype=torch.long).scatter_(0, torch.tensor(order), torch.arange(len(order)))
        columns = torch.arange(longest).expand_as(ids)
        tensors = (ids[new], columns[new], nodes[places], slots, *calls)
        input_ids, position_ids, nodes, slots, *calls = (tensor.to(device) for tensor in tensors)
        return cls(input_ids, position_ids, nodes, calls, slots)

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of a model for which `can_pack`; its outputs are [1, nodes, …]. Transformers returns a mask of four
        dimensions as it is, and this one is not used."""
        return {
            "input_ids": self.input_ids[None],
            "position_ids": self.position_ids[None],
            "attention_mask": self.input_ids.new_zeros(1, 1, 1, 1),
            "packed": self,
        }


def _calls(
    nodes: Int[Tensor, "rows longest"], new: Int[Tensor, "rows longest"], lengths: list[int]
) -> tuple[list[Tensor], Int[Tensor, "nodes"]]:
    """`Packed.calls` and `Packed.slots`. Sequences without a node of their own are left out."""
    rows = sorted(torch.nonzero(new.any(dim=1))[:, 0].tolist(), key=lengths.__getitem__)
    groups: list[list[int]] = []
    for row in rows:
        if not groups or lengths[row] > LONGEST_TO_SHORTEST * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    tables = [nodes[group, : lengths[group[-1]]] for group in groups]
    owners = torch.cat([new[group, : lengths[group[-1]]].reshape(-1) for group in groups]).nonzero()[:, 0]
    slots = torch.empty_like(owners)
    slots[torch.cat([table.reshape(-1) for table in tables])[owners]] = owners
    return tables, slots


def attention(
    module: torch.nn.Module,
    query: Float[Tensor, "1 heads nodes size"],
    key: Float[Tensor, "1 groups nodes size"],
    value: Float[Tensor, "1 groups nodes size"],
    attention_mask: Tensor | None,
    packed: Packed | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "1 nodes heads size"], None]:
    """An attention function of transformers: causal attention within each sequence of `packed`; without it, that of
    `sdpa`. Raises ValueError for attention of another kind."""
    if packed is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return plain
    if met := [name for name in UNSUPPORTED if options.get(name) is not None]:
        raise ValueError(f"{type(module).__name__}: packed attention has no {', '.join(met)}")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__}: packed attention is causal")
    flat = [x[0].transpose(0, 1).reshape(x.shape[2], -1) for x in (query, key, value)]
    rounds = query.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    outputs = []
    for nodes in packed.calls:
        parts = [
            embedding(nodes, rows).view(*nodes.shape, x.shape[1], -1).transpose(1, 2)
            for rows, x in zip(flat, (query, key, value), strict=True)
        ]
        if rounds and nodes.shape[1] <= LONGEST_AS_PRODUCTS:
            rounded = (part.bfloat16() for part in parts)
            output = _Attention.apply(*rounded, options.get("scaling")).transpose(1, 2)  # type: ignore[no-untyped-call]
        else:
            output = sdpa_attention_forward(module, *parts, None, **options)[0]
        outputs.append(output.flatten(2).flatten(0, 1))
    return embedding(packed.slots, torch.cat(outputs)).view(1, query.shape[2], query.shape[1], -1), None


class _Attention(torch.autograd.Function):
    """Causal attention of torch with another backward pass: that of the three plain steps, products, softmax,
    products. On a CPU torch's own takes two to six times as long in bfloat16 for sequences of up to 200 tokens."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Of [sequences, heads, tokens, size], keys and values with as many heads or a divisor of it."""
        ctx.save_for_backward(query, key, value)
        ctx.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=ctx.scaling, enable_gqa=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            output = _causal(query, key, value, ctx.scaling)
        return *torch.autograd.grad(output, (query, key, value), gradient), None


def _causal(
    query: Float[Tensor, "sequences heads tokens size"],
    key: Float[Tensor, "sequences groups tokens size"],
    value: Float[Tensor, "sequences groups tokens size"],
    scaling: float,
) -> Float[Tensor, "sequences heads tokens size"]:
    """Causal attention, the heads of a group as one product."""
    tokens, share = query.shape[2], query.shape[1] // key.shape[1]
    q = query.reshape(-1, share * tokens, query.shape[-1])
    k, v = key.flatten(0, 1), value.flatten(0, 1)
    later = q.new_full((tokens, tokens), -torch.inf).triu(1).repeat(share, 1)
    weights = torch.baddbmm(later, q, k.transpose(1, 2), alpha=scaling).softmax(-1)
    return torch.bmm(weights, v).view(*query.shape[:-1], value.shape[-1])


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)

_decided: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the model can read `Packed.inputs`. Decided once per model, whose attention function this replaces by
    `attention`, by reading two short sequences with it and without."""
    if model not in _decided:
        _decided[model] = _replace_attention(model)
    return _decided[model]


@torch.no_grad()
def _replace_attention(model: PreTrainedModel) -> bool:
    before, kinds = model.config._attn_implementation, getattr(model.config, "layer_types", None) or ()
    if before not in ("sdpa", ATTENTION) or any(kind != "full_attention" for kind in kinds):
        return False
    if not model._can_set_attn_implementation():
        return False
    body = getattr(model, model.base_model_prefix)
    vocabulary = body.get_input_embeddings().num_embeddings
    sequences = [[token % vocabulary for token in row] for row in ((2, 3, 4, 5), (2, 3, 6))]
    device = body.get_input_embeddings().weight.device
    try:
        with torch.autocast(device.type, enabled=False), _exact_products():
            alone = [body(input_ids=torch.tensor([row], device=device)).last_hidden_state[0] for row in sequences]
            model.set_attn_implementation(ATTENTION)
            packed = Packed.of(sequences, device)
            states = body(**packed.inputs, use_cache=False).last_hidden_state[0]
        found = torch.cat([states[nodes[: len(row)]] for nodes, row in zip(packed.nodes, alone, strict=True)])
        if _equal(found, torch.cat(alone)):
            return True
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):  # says nothing about the architecture
            model.set_attn_implementation(before)
            raise
        # an architecture that passes no arguments on, or has attention of another kind
    model.set_attn_implementation(before)
    return False


@contextmanager
def _exact_products() -> Iterator[None]:
    """In this context float32 products on a GPU do not round their factors (TensorFloat-32): that would exceed
    `EXACT`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _equal(found: Float[Tensor, "tokens hidden"], expected: Float[Tensor, "tokens hidden"]) -> bool:
    """Whether hidden states agree as far as their precision allows. With fewer bits than float32 each token's whole
    vector is compared: a few of its numbers are so large that an error of the others is below their rounding."""
    if found.dtype == torch.float32:
        return bool((found - expected).abs().max() <= EXACT * expected.abs().max())
    found, expected = found.float(), expected.float()
    return bool(((found - expected).norm(dim=1) <= ROUNDED * expected.norm(dim=1)).all())
