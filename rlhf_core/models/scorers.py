"""Scorers give a whole answer one number, in PPO and in evaluation. A scorer receives text and token ids, so that
it can be a reward model with the policy's tokenizer, one with its own tokenizer, a rule, or a service."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from rlhf_core.data.chat import Conversation
from rlhf_core.models.batch import pad_batch, sequence_scores
from rlhf_core.models.batching import in_length_order


@dataclass(frozen=True)
class Answers:
    """Responses to be scored: as text, and as the very token ids that were sampled."""

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
    """A reward model that shares the policy's tokenizer: it reads the sampled ids, nothing is decoded on the way."""

    model: PreTrainedModel
    pad_id: int
    batch_size: int

    @torch.no_grad()
    def __call__(self, answers: Answers) -> list[float]:
        """The scalar at each answer's last real token."""
        lengths = [len(p) + len(r) for p, r in zip(answers.prompt_ids, answers.response_ids, strict=True)]

        def score(rows: list[int]) -> list[float]:
            prompts, responses = ([ids[i] for i in rows] for ids in (answers.prompt_ids, answers.response_ids))
            return sequence_scores(self.model, pad_batch(prompts, responses, self.pad_id, self.model.device)).tolist()

        return in_length_order(lengths, self.batch_size, score)
