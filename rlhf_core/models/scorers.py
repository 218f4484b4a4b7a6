"""Scorers: what gives a whole answer one number during PPO and evaluation.

A scorer sees text and token ids and picks what it needs, so that a reward model with the policy's tokenizer, one with a
tokenizer of its own, a rule, or a service fit the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from rlhf_core.data.chat import Conversation
from rlhf_core.models.batch import pad_batch, sequence_scores


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
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        scores = [0.0] * len(order)
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            batch = pad_batch(
                [answers.prompt_ids[i] for i in rows],
                [answers.response_ids[i] for i in rows],
                self.pad_id,
                self.model.device,
            )
            for i, score in zip(rows, sequence_scores(self.model, batch).tolist(), strict=True):
                scores[i] = score
        return scores
