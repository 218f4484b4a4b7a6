"""Pretraining: next-token prediction on plain text."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.base import PretrainConfig
from rlhf_core.errors import UserError
from rlhf_core.training.run import Run, Schedule, train, trainer_arguments
from rlhf_core.training.trainer import GuardedTrainer


def pretrain(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    config: PretrainConfig,
    context: int,
    run: Run,
) -> list[dict[str, float]]:
    """Train on documents (token ids), packed into blocks of `context` tokens. Returns the training log.

    Raises UserError when the text does not fill one block.
    """
    blocks = pack(documents, context)
    if not blocks:
        raise UserError(f"base.pretrain: the training text has fewer than {context} tokens; set pretrain.steps to 0")
    schedule = Schedule(
        learning_rate=config.learning_rate,
        batch_size=config.batch_size,
        micro_batch_size=config.batch_size,
        warmup_steps=max(1, config.steps // 20),
        weight_decay=0.0,
        max_steps=config.steps,
    )
    trainer = GuardedTrainer(
        run,
        "base.pretrain.batch_size",
        model=model,
        args=trainer_arguments(run, schedule),
        train_dataset=blocks,
        data_collator=collate_blocks,
    )
    return train(trainer, run)


def pack(documents: Sequence[Sequence[int]], context: int) -> list[list[int]]:
    """The concatenated documents, cut into full blocks; the remainder is dropped."""
    stream = [token for document in documents for token in document]
    return [stream[i : i + context] for i in range(0, len(stream) - context + 1, context)]


def collate_blocks(blocks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Blocks of equal length as model inputs; every token is a label."""
    ids: Tensor = torch.tensor(blocks)
    return {"input_ids": ids, "labels": ids}
