"""Scorers give a whole answer one number. A scorer receives text and token ids, so that it can be a reward model with
the policy's tokenizer, one with its own tokenizer, a rule, or a service."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from rlhf_core.data.chat import Conversation
from rlhf_core.models.batch import TokenBatch, map_batches, sequence_scores


@dataclass(frozen=True)
class Answers:
    """Responses to be scored, as text and as the sampled token ids."""

    prompts: Sequence[Conversation]
    texts: Sequence[str]
    prompt_ids: Sequence[Sequence[int]]
    response_ids: Sequence[Sequence[int]]

    def at(self, rows: Sequence[int]) -> "Answers":
        """Those at the given places."""
        parts = (self.prompts, self.texts, self.prompt_ids, self.response_ids)
        return Answers(*([part[i] for i in rows] for part in parts))  # type: ignore[arg-type]


class Scorer(Protocol):
    """Gives each answer a raw score; higher is better."""

    def __call__(self, answers: Answers) -> list[float]:
        """One finite number for each answer."""


@dataclass(frozen=True)
class RewardModelScorer:
    """A reward model that shares the policy's tokenizer: it reads the sampled ids without decoding them."""

    model: PreTrainedModel
    pad_id: int
    batch_size: int

    @torch.no_grad()
    def __call__(self, answers: Answers) -> list[float]:
        """The scalar at each answer's last real token."""

        def score(batch: TokenBatch) -> list[float]:
            return sequence_scores(self.model, batch).tolist()

        return map_batches(
            score,
            answers.prompt_ids,
            answers.response_ids,
            pad_id=self.pad_id,
            batch_size=self.batch_size,
            device=self.model.device,
        )
