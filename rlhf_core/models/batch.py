"""Prompts and responses as one padded tensor (prompts on the left, responses on the right), and forward passes over it,
in which no padding is computed where the model allows it. Masks come from lengths, never from token ids: a policy may
sample the pad token."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models.batching import micro_batches, tokens_per_pass
from rlhf_core.models.head import Predictions, read
from rlhf_core.models.hf import scalar_head
from rlhf_core.models.masked import zero_padding
from rlhf_core.models.packed import Packed, can_pack
from rlhf_core.progress import report

Result = TypeVar("Result")


@dataclass(frozen=True)
class TokenBatch:
    """B sequences of P prompt and T response positions."""

    input_ids: Int[Tensor, "batch sequence"]
    attention_mask: Int[Tensor, "batch sequence"]
    mask: Float[Tensor, "batch time"]
    """1 on every generated token up to and including the first end-of-sequence token; of a response with several turns
    (`counted`), on some of its tokens."""

    @property
    def time(self) -> int:
        """T, the response positions."""
        return self.mask.shape[1]

    @property
    def actions(self) -> Int[Tensor, "batch time"]:
        """The response's token ids."""
        return self.input_ids[:, -self.time :]

    @cached_property
    def real(self) -> tuple[Int[Tensor, "tokens"], Int[Tensor, "tokens"]]:
        """Row and time of every response token, row by row."""
        rows, times = self.mask.nonzero(as_tuple=True)
        return rows, times

    @property
    def response_tokens(self) -> Int[Tensor, "tokens"]:
        """The ids of the response tokens, row by row, without padding."""
        return self.actions[self.real]

    def spread(self, values: Shaped[Tensor, "tokens *shape"]) -> Shaped[Tensor, "batch time *shape"]:
        """One value for each response token as a padded tensor, 0 on padding."""
        return values.new_zeros(*self.mask.shape, *values.shape[1:]).index_put(self.real, values)

    @property
    def position_ids(self) -> Int[Tensor, "batch sequence"]:
        """Positions counted over real tokens."""
        return positions_of(self.attention_mask)

    @cached_property
    def ends(self) -> Int[Tensor, "batch"]:
        """The column of each row's last real token."""
        columns = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return (columns * self.attention_mask).argmax(dim=1)

    @cached_property
    def whole(self) -> Packed:
        """The rows without padding."""
        return self._packed(self.attention_mask.bool())

    @cached_property
    def states(self) -> Packed:
        """As `whole`, without the last token of each response, which predicts nothing."""
        keep = self.attention_mask.bool()
        columns = torch.arange(keep.shape[1], device=keep.device)
        return self._packed(keep & ~((columns == self.ends[:, None]) & self.mask.any(dim=1, keepdim=True)))

    @cached_property
    def predictors(self) -> Int[Tensor, "tokens"]:
        """The node of `states` that predicts each response token."""
        rows, times = self.real
        return self.states.nodes[rows, self.position_ids[rows, times + self.input_ids.shape[1] - self.time - 1]]

    def rows(self, rows: Sequence[int]) -> "TokenBatch":
        """Some rows, without columns that are padding in all of them."""
        place = torch.tensor(rows, device=self.mask.device)
        ids, attention, mask = self.input_ids[place], self.attention_mask[place], self.mask[place]
        used = attention.any(dim=0).nonzero()[:, 0]
        counted = mask.any(dim=0).nonzero()
        first, time = int(used[0]), int(counted[-1]) + 1 if len(counted) else 1
        end = ids.shape[1] - self.time + time
        return TokenBatch(ids[:, first:end], attention[:, first:end], mask[:, :time])

    def _packed(self, keep: Bool[Tensor, "batch sequence"]) -> Packed:
        rows = zip(self.input_ids.cpu(), keep.cpu(), strict=True)
        return Packed.of([ids[real].tolist() for ids, real in rows], self.input_ids.device)


def positions_of(attention_mask: Int[Tensor, "batch sequence"]) -> Int[Tensor, "batch sequence"]:
    """Positions counted over real tokens, so that left padding changes nothing."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def pad_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    pad_id: int,
    device: torch.device | str = "cpu",
    counted: Sequence[Sequence[bool] | None] | None = None,
) -> TokenBatch:
    """One padded batch. T is at least 1, so that an empty response keeps its row. `counted`: which tokens of each
    response the mask has; None: all."""
    width = max(len(p) for p in prompts)
    time = max(1, max(len(r) for r in responses))
    ids = torch.full((len(prompts), width + time), pad_id, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start, end = width - len(prompt), width + len(response)
        ids[row, start:end] = torch.tensor([*prompt, *response], dtype=torch.long)
        attention[row, start:end] = 1
    mask = attention[:, width:].float()
    for row, some in enumerate(counted or ()):
        if some is not None:
            mask[row, : len(some)] = torch.tensor(some, dtype=torch.float32)
    return TokenBatch(ids.to(device), attention.to(device), mask.to(device))


def map_batches(
    read: Callable[[TokenBatch], Iterable[Result]],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    pad_id: int,
    batch_size: int,
    device: torch.device,
    counted: Sequence[Sequence[bool] | None] | None = None,
) -> list[Result]:
    """`read` on padded batches of at most `batch_size` rows of similar length, each with at most the tokens of a
    training pass; it returns one result a row. The results are in the order of the rows. `counted` as in `pad_batch`.
    Raises ValueError where there are not as many responses as prompts."""
    lengths = [(len(prompt), max(1, len(response))) for prompt, response in zip(prompts, responses, strict=True)]
    found: dict[int, Result] = {}
    for rows in micro_batches(range(len(lengths)), lengths, batch_size, tokens_per_pass(device)):
        report("reading", len(found), len(lengths))
        some = None if counted is None else [counted[i] for i in rows]
        batch = pad_batch([prompts[i] for i in rows], [responses[i] for i in rows], pad_id, device, some)
        found |= zip(rows, read(batch), strict=True)
    return [found[i] for i in range(len(lengths))]


def in_passes(read: Callable[[TokenBatch], Float[Tensor, "rows"]], batch: TokenBatch) -> Float[Tensor, "batch"]:
    """`read` on parts of the batch that fit into a training pass, rows of equal prompts together; it returns one number
    a row. With gradient."""
    prompts = batch.input_ids[:, : -batch.time].tolist()
    responses = batch.mask.sum(dim=1).int().tolist()
    lengths = [(int(n) - r, r) for n, r in zip(batch.attention_mask.sum(dim=1).tolist(), responses, strict=True)]
    groups = micro_batches(range(len(prompts)), lengths, len(prompts), tokens_per_pass(batch.mask.device), prompts)
    found = torch.cat([read(batch.rows(group)) for group in groups])
    return found[torch.tensor([row for group in groups for row in group], device=found.device).argsort()]


def predict(model: PreTrainedModel, batch: TokenBatch) -> Predictions:
    """One forward pass: what predicts each response token, row by row. No logits are computed."""
    packs, width = can_pack(model), batch.input_ids.shape[1]
    inputs = batch.states.inputs if packs else _padded(batch)
    keep = batch.predictors if packs else torch.arange(width - batch.time - 1, width - 1, device=batch.mask.device)
    return read(model, keep, inputs).at(0 if packs else batch.real)


def response_logits(model: PreTrainedModel, batch: TokenBatch) -> Float[Tensor, "tokens vocabulary"]:
    """All logits that predict each response token, float32; for few tokens."""
    return predict(model, batch).logits()


def _padded(batch: TokenBatch) -> dict[str, Any]:
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids,
    }


def _token_values(model: PreTrainedModel, inputs: dict[str, Any]) -> Float[Tensor, "rows positions"]:
    """In float32: the head computes in the precision of its own weights, also under autocast."""
    body, head = getattr(model, model.base_model_prefix), scalar_head(model)
    hidden = body(**inputs, use_cache=False).last_hidden_state
    with torch.autocast(hidden.device.type, enabled=False):
        values: Tensor = head(hidden.to(head.weight.dtype))[..., 0].float()
    return values


def state_values(model: PreTrainedModel, batch: TokenBatch) -> Float[Tensor, "batch time"]:
    """V(s_t) in float32, read at the position whose next token is action t; 0 on padding."""
    if can_pack(model):
        return batch.spread(_token_values(model, batch.states.inputs)[0, batch.predictors])
    return zero_padding(_token_values(model, _padded(batch))[:, -(batch.time + 1) : -1], batch.mask)


def sequence_scores(model: PreTrainedModel, batch: TokenBatch) -> Float[Tensor, "batch"]:
    """The scalar at each sequence's last real token (the last prompt token when the response is empty), float32."""
    rows = torch.arange(len(batch.ends), device=batch.ends.device)
    if can_pack(model):
        last = batch.attention_mask.sum(dim=1) - 1
        return _token_values(model, batch.whole.inputs)[0, batch.whole.nodes[rows, last]]
    return _token_values(model, _padded(batch))[rows, batch.ends]
