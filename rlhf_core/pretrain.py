"""Pretraining: next-token prediction on plain text."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.base import PretrainConfig
from rlhf_core.errors import UserError
from rlhf_core.models.batch import pad_batch
from rlhf_core.models.sequence_logprobs import response_logprobs
from rlhf_core.models.sharding import within
from rlhf_core.training.loop import Schedule, Training
from rlhf_core.training.run import Run


def pretrain(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], config: PretrainConfig, context: int, run: Run
) -> list[dict[str, float]]:
    """Train on documents (token ids), packed into blocks of `context` tokens. Returns the training log.

    Raises UserError when the text does not fill one block.
    """
    blocks = pack(documents, context)
    if not blocks:
        raise UserError(f"base.pretrain: the training text has fewer than {context} tokens; set pretrain.steps to 0")

    def sums(places: Sequence[int]) -> dict[str, Tensor]:
        rows = [blocks[place] for place in places]  # every token but the first is learnt
        batch = pad_batch([row[:1] for row in rows], [row[1:] for row in rows], 0, model.device)
        return {"loss": -within(model, partial(response_logprobs, model, batch)).sum()}

    schedule = Schedule(config.learning_rate, config.batch_size, config.steps, max(1, config.steps // 20), 0.0)
    sizes = [context - 1] * len(blocks), [context] * len(blocks)
    loop = Training(model, sums, *sizes, schedule, run, "base.pretrain.batch_size")
    with loop.running():
        while not loop.ended:
            loop.step()
            loop.checkpoint()
    return loop.log


def pack(documents: Sequence[Sequence[int]], context: int) -> list[list[int]]:
    """The concatenated documents, cut into full blocks; the remainder is dropped."""
    stream = [token for document in documents for token in document]
    return [stream[i : i + context] for i in range(0, len(stream) - context + 1, context)]
