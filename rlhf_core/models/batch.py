"""Prompts and responses as one padded tensor (prompts on the left, responses on the right), and forward passes over it.
Masks come from lengths, never from token ids: a policy may sample the pad token."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from rlhf_core.models.batching import in_length_order
from rlhf_core.models.hf import scalar_head

Result = TypeVar("Result")


@dataclass(frozen=True)
class TokenBatch:
    """B sequences of P prompt and T response positions."""

    input_ids: Int[Tensor, "batch sequence"]
    attention_mask: Int[Tensor, "batch sequence"]
    mask: Float[Tensor, "batch time"]
    """1 on every generated token up to and including the first end-of-sequence token."""

    @property
    def time(self) -> int:
        """T, the response positions."""
        return self.mask.shape[1]

    @property
    def actions(self) -> Int[Tensor, "batch time"]:
        """The response's token ids."""
        return self.input_ids[:, -self.time :]

    @property
    def position_ids(self) -> Int[Tensor, "batch sequence"]:
        """Positions counted over real tokens."""
        return positions_of(self.attention_mask)


def positions_of(attention_mask: Int[Tensor, "batch sequence"]) -> Int[Tensor, "batch sequence"]:
    """Positions counted over real tokens, so that left padding changes nothing."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def pad_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    pad_id: int,
    device: torch.device | str = "cpu",
) -> TokenBatch:
    """One padded batch. T is at least 1, so that an empty response keeps its row."""
    width = max(len(p) for p in prompts)
    time = max(1, max(len(r) for r in responses))
    ids = torch.full((len(prompts), width + time), pad_id, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start, end = width - len(prompt), width + len(response)
        ids[row, start:end] = torch.tensor([*prompt, *response], dtype=torch.long)
        attention[row, start:end] = 1
    return TokenBatch(ids.to(device), attention.to(device), attention[:, width:].float().to(device))


def map_batches(
    read: Callable[[TokenBatch], Iterable[Result]],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    pad_id: int,
    batch_size: int,
    device: torch.device,
) -> list[Result]:
    """`read` on padded batches of at most `batch_size` rows of similar length; it returns one result a row. The results
    are in the order of the rows. Raises ValueError where there are not as many responses as prompts."""
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]

    def work(rows: list[int]) -> Iterable[Result]:
        return read(pad_batch([prompts[i] for i in rows], [responses[i] for i in rows], pad_id, device))

    return in_length_order(lengths, batch_size, work)


def response_logits(model: PreTrainedModel, batch: TokenBatch) -> Float[Tensor, "batch time vocabulary"]:
    """Logits that predict each response token, in the model's precision; computed for response positions only."""
    logits: Tensor = _read(model, batch).logits
    return logits


def response_logits_and_hidden(
    model: PreTrainedModel, batch: TokenBatch
) -> tuple[Float[Tensor, "batch time vocabulary"], Float[Tensor, "batch time hidden"]]:
    """One forward pass for both: logits as `response_logits`, and the last hidden states they are read from."""
    output = _read(model, batch, output_hidden_states=True)
    return output.logits, output.hidden_states[-1][:, -(batch.time + 1) : -1]


def _read(model: PreTrainedModel, batch: TokenBatch, **options: bool) -> CausalLMOutputWithPast:
    width = batch.input_ids.shape[1]
    output: CausalLMOutputWithPast = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=torch.arange(width - batch.time - 1, width - 1, device=batch.input_ids.device),
        use_cache=False,
        **options,
    )
    if output.logits.shape[1] == width:  # custom models may ignore logits_to_keep
        output.logits = output.logits[:, -(batch.time + 1) : -1]
    return output


def token_values(model: PreTrainedModel, batch: TokenBatch) -> Float[Tensor, "batch sequence"]:
    """The scalar head's output at every position, float32."""
    body = getattr(model, model.base_model_prefix)
    hidden = body(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    ).last_hidden_state
    values: Tensor = scalar_head(model)(hidden)[..., 0].float()
    return values


def state_values(model: PreTrainedModel, batch: TokenBatch) -> Float[Tensor, "batch time"]:
    """V(s_t), read at the position whose next token is action t."""
    return token_values(model, batch)[:, -(batch.time + 1) : -1]


def sequence_scores(model: PreTrainedModel, batch: TokenBatch) -> Float[Tensor, "batch"]:
    """The scalar at each sequence's last real token (the last prompt token when the response is empty)."""
    last = batch.input_ids.shape[1] - batch.time - 1 + batch.mask.sum(dim=1).long()
    return token_values(model, batch).gather(1, last[:, None])[:, 0]
