"""Scorers give a whole answer one number. A scorer receives text and token ids, so that it can be a reward model with
the policy's tokenizer, one with its own tokenizer, a rule, or a service."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from rlhf_core.data.chat import Conversation
from rlhf_core.data.tokenizer import closed
from rlhf_core.functions.process import RewardFunction
from rlhf_core.models.batch import TokenBatch, map_batches, sequence_scores


@dataclass(frozen=True)
class Answers:
    """Responses to be scored, as text and as the sampled token ids."""

    prompts: Sequence[Conversation]
    texts: Sequence[str]
    prompt_ids: Sequence[Sequence[int]]
    response_ids: Sequence[Sequence[int]]
    rows: Sequence[Mapping[str, object]] | None = None
    """The rows of the data behind the prompts, for functions; None where no scorer needs them."""

    def at(self, rows: Sequence[int]) -> "Answers":
        """Those at the given places."""
        columns = (self.prompts, self.texts, self.prompt_ids, self.response_ids, self.rows)
        return Answers(*(column and [column[i] for i in rows] for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Scored:
    """The scores of some answers."""

    total: list[float]
    """One number for each answer: what is maximised."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    """Figures beside it, by name, one number for each answer: what the total was made from."""

    def by_answer(self) -> list[tuple[float, dict[str, float]]]:
        """Total and parts of each answer."""
        return [(total, {name: part[i] for name, part in self.parts.items()}) for i, total in enumerate(self.total)]

    @classmethod
    def joined(cls, answers: Sequence[tuple[float, dict[str, float]]]) -> "Scored":
        """The inverse of `by_answer`; every answer has the same parts."""
        names = answers[0][1] if answers else {}
        return cls([total for total, _ in answers], {name: [parts[name] for _, parts in answers] for name in names})


class Scorer(Protocol):
    """Gives each answer a raw score; higher is better."""

    def __call__(self, answers: Answers) -> Scored:
        """One finite number for each answer, and for each part of it."""


@dataclass(frozen=True)
class RewardModelScorer:
    """A reward model that shares the policy's tokenizer: it reads the sampled ids without decoding them, closed as the
    answers that it was trained on."""

    model: PreTrainedModel
    pad_id: int
    batch_size: int
    ends: Mapping[int, int] = field(default_factory=dict)
    """See `other_ends`."""

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


@dataclass(frozen=True)
class FunctionScorer:
    """A Python function of the user: it receives prompts, texts, and the rows of the data."""

    function: RewardFunction

    def __call__(self, answers: Answers) -> Scored:
        """The function's number for each answer. Raises UserError, naming the answer, where it has none."""
        rows = [{} for _ in answers.texts] if answers.rows is None else answers.rows
        return Scored(self.function(answers.prompts, answers.texts, rows))


@dataclass(frozen=True)
class Observed:
    """A scorer whose score is maximised, beside others that are only recorded: each of these is a part."""

    scorer: Scorer
    observers: Mapping[str, Scorer]

    def __call__(self, answers: Answers) -> Scored:
        """The scorer's total and parts, and the total of each observer."""
        scored = self.scorer(answers)
        return Scored(scored.total, scored.parts | {name: each(answers).total for name, each in self.observers.items()})


@dataclass(frozen=True)
class WeightedSum:
    """Several scorers: the total is the sum of weight times score. Each term is a part, and so are its parts."""

    terms: Mapping[str, tuple[float, Scorer]]
    """Weight and scorer, by name."""

    def __call__(self, answers: Answers) -> Scored:
        """The total, and the score of each term before it is weighted."""
        scored = {name: scorer(answers) for name, (_, scorer) in self.terms.items()}
        weights = [weight for weight, _ in self.terms.values()]
        total = [
            sum(weight * score for weight, score in zip(weights, scores, strict=True))
            for scores in zip(*(each.total for each in scored.values()), strict=True)
        ]
        parts = {name: each.total for name, each in scored.items()}
        for each in scored.values():
            parts |= each.parts
        return Scored(total, parts)


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
