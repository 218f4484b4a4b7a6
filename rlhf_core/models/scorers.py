"""Reward models as scorers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass

import torch
from transformers import PreTrainedModel

from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.data.tokenizer import closed
from rlhf_core.models.batch import TokenBatch, map_batches, sequence_scores

REWARD_MODEL_NAME = "reward model"


@dataclass(frozen=True)
class RewardModelScorer:
    """A reward model that shares the policy's tokenizer: it reads the sampled ids without decoding them, closed as the
    answers that it was trained on."""

    model: PreTrainedModel
    pad_id: int
    batch_size: int
    ends: Mapping[int, int] = field(default_factory=dict)
    """See `other_ends`."""
    name: str = REWARD_MODEL_NAME

    @torch.no_grad()
    def __call__(self, answers: Answers) -> Scored:
        """The scalar at each answer's last real token."""

        def score(batch: TokenBatch) -> list[float]:
            return sequence_scores(self.model, batch).tolist()

        scores = map_batches(
            score,
            answers.prompt_ids,
            [closed(ids, self.ends) for ids in answers.response_ids],
            pad_id=self.pad_id,
            batch_size=self.batch_size,
            device=self.model.device,
        )
        return Scored(scores)


def models_of(scorer: object) -> list[PreTrainedModel]:
    """The models in a scorer, at any depth of dataclasses, sequences and mappings."""
    if isinstance(scorer, PreTrainedModel):
        return [scorer]
    parts: list[object] = []
    if is_dataclass(scorer):
        parts = [getattr(scorer, part.name) for part in fields(scorer)]
    elif isinstance(scorer, Mapping):
        parts = list(scorer.values())
    elif isinstance(scorer, list | tuple):
        parts = list(scorer)
    return [model for part in parts for model in models_of(part)]
