"""Forward passes over several responses to each prompt: keys and values of a prompt are computed once."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rlhf_core.models.batch import positions_of
from rlhf_core.models.batching import micro_batches, tokens_per_pass
from rlhf_core.models.hf import scalar_head
from rlhf_core.models.sampling import left_padded
from rlhf_core.models.token_logprobs import logprobs_and_entropy

Read = Callable[..., Tensor]
"""(positions to keep, inputs of a transformers model) → its outputs [rows, positions, outputs] at the last of them."""


@dataclass(frozen=True)
class SharedPrompts:
    """Responses to some prompts, each prompt once."""

    prompt_ids: Int[Tensor, "prompts width"]
    """Padded on the left."""
    prompt_mask: Int[Tensor, "prompts width"]
    response_ids: Int[Tensor, "rows time"]
    """Padded on the right."""
    mask: Float[Tensor, "rows time"]
    """1 on the tokens of a response."""
    owner: Int[Tensor, "rows"]
    """The index of a row's prompt."""

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[Sequence[int]]], pad_id: int
    ) -> "SharedPrompts":
        """Prompts as token ids, each with its responses. Rows are in this order."""
        rows = [response for group in responses for response in group]
        time = max(1, max(len(row) for row in rows))
        ids, mask = torch.full((len(rows), time), pad_id), torch.zeros(len(rows), time)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row, dtype=torch.long)
            mask[place, : len(row)] = 1
        owner = torch.tensor([place for place, group in enumerate(responses) for _ in group])
        return cls(*left_padded(prompts, pad_id, torch.device("cpu")), ids, mask, owner)

    def to(self, device: torch.device) -> "SharedPrompts":
        """The same on a device."""
        return SharedPrompts(*(tensor.to(device) for tensor in vars(self).values()))


def shared_prompt_scores(model: PreTrainedModel, batch: SharedPrompts) -> Float[Tensor, "rows"]:
    """The scalar of a reward model at each response's last token (at the prompt's for an empty response), float32, with
    gradient."""
    body, head = getattr(model, model.base_model_prefix), scalar_head(model)

    def read(keep: int, **inputs: Any) -> Tensor:
        values: Tensor = head(body(**inputs).last_hidden_state[:, -keep:]).float()
        return values

    def at_the_end(rows: Tensor, outputs: Tensor) -> Tensor:
        return outputs[torch.arange(len(rows), device=rows.device), batch.mask[rows].sum(dim=1).long(), 0]

    return _read_rows(model, batch, read, at_the_end)


def shared_prompt_logprobs(model: PreTrainedModel, batch: SharedPrompts) -> Float[Tensor, "rows"]:
    """Σ_t log π(y_t | x, y_<t) of each response, in nats, float32, at temperature 1, with gradient; 0 for an empty
    response."""

    def summed(rows: Tensor, logits: Tensor) -> Tensor:
        time = logits.shape[1] - 1
        actions, mask = batch.response_ids[rows, :time], batch.mask[rows, :time]
        return logprobs_and_entropy(logits[:, :-1], actions, mask=mask)[0].sum(dim=1)

    def read(keep: int, **inputs: Any) -> Tensor:
        logits: Tensor = model(**inputs, logits_to_keep=keep).logits
        return logits

    return _read_rows(model, batch, read, summed)


def _read_rows(
    model: PreTrainedModel, batch: SharedPrompts, read: Read, reduce: Callable[[Tensor, Tensor], Tensor]
) -> Float[Tensor, "rows"]:
    """One number a row: `reduce` of some rows and of the model's outputs [rows, 1 + time, outputs] on them, at the last
    token of the prompt and at each token of the response. Rows of similar length are read together."""
    cache = DynamicCache(config=model.config)
    if not all(isinstance(layer, DynamicLayer) for layer in cache.layers):  # a recurrent state that passes no gradient
        return reduce(torch.arange(len(batch.owner), device=batch.owner.device), _whole_rows(batch, read))
    positions = positions_of(batch.prompt_mask)
    prompts = read(
        keep=1,
        input_ids=batch.prompt_ids,
        attention_mask=batch.prompt_mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    )
    lengths = [(0, int(length)) for length in batch.mask.sum(dim=1).tolist()]
    groups = micro_batches(range(len(lengths)), lengths, len(lengths), tokens_per_pass(batch.mask.device))
    found = []
    for group in groups:
        rows = torch.tensor(group, device=batch.owner.device)
        owner, time = batch.owner[rows], max(1, lengths[group[-1]][1])
        responses = read(
            keep=time,
            input_ids=batch.response_ids[rows, :time],
            attention_mask=torch.cat([batch.prompt_mask[owner], batch.mask[rows, :time].long()], dim=1),
            position_ids=positions[owner, -1:] + 1 + torch.arange(time, device=rows.device),
            past_key_values=_selected(cache, owner),
            use_cache=True,
        )
        found.append(reduce(rows, torch.cat([prompts[owner], responses], dim=1)))
    order = torch.tensor([row for group in groups for row in group], device=batch.owner.device)
    return torch.cat(found)[order.argsort()]


def _whole_rows(batch: SharedPrompts, read: Read) -> Float[Tensor, "rows positions outputs"]:
    """For models without a cache of keys and values: each row reads its prompt itself."""
    attention = torch.cat([batch.prompt_mask[batch.owner], batch.mask.long()], dim=1)
    return read(
        keep=batch.mask.shape[1] + 1,
        input_ids=torch.cat([batch.prompt_ids[batch.owner], batch.response_ids], dim=1),
        attention_mask=attention,
        position_ids=positions_of(attention),
        use_cache=False,
    )


def _selected(cache: DynamicCache, rows: Tensor) -> DynamicCache:
    """A cache with these rows of another one, which stays as it is; a row may be taken more than once."""
    taken = copy.copy(cache)
    taken.layers = [copy.copy(layer) for layer in cache.layers]
    taken.batch_select_indices(rows)
    return taken
