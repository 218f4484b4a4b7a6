"""log π of whole responses under a language model, with a gradient (DPO) and without one (references, evaluation)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models.batch import TokenBatch, map_batches, predict
from rlhf_core.models.token_logprobs import action_logprobs


def response_logprobs(model: PreTrainedModel, batch: TokenBatch) -> Float[Tensor, "batch"]:
    """Σ_t log π(y_t | x, y_<t) over the mask of each row [B], in nats, float32, at temperature 1; 0 for an empty
    response."""
    return batch.spread(action_logprobs(predict(model, batch), batch.response_tokens)).sum(dim=1)


@torch.no_grad()
def sequence_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    pad_id: int,
    batch_size: int,
    counted: Sequence[Sequence[bool] | None] | None = None,
) -> list[float]:
    """log π(response | prompt) of each response in nats, in the order given, without gradient.

    Prompts and responses are token ids; a response counts with all its tokens, end-of-sequence included, or with those
    that are `counted`. `batch_size` changes the result by rounding only.
    """

    def read(batch: TokenBatch) -> list[float]:
        return response_logprobs(model, batch).tolist()

    return map_batches(
        read, prompts, responses, pad_id=pad_id, batch_size=batch_size, device=model.device, counted=counted
    )
