"""Scorers: answers in, numbers out. A reward model, a Python function, the demo's rubric and a weighted sum of scorers
are all used in the same way, by training and by evaluation."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhf_core.data.chat import Conversation


@dataclass(frozen=True)
class Answers:
    """Answers to be scored: a scorer reads the texts, or the very tokens that were sampled."""

    prompts: Sequence[Conversation]
    texts: Sequence[str]
    prompt_ids: Sequence[Sequence[int]] = ()
    """Empty where no scorer reads tokens; so are the ids of the responses."""
    response_ids: Sequence[Sequence[int]] = ()
    """As `closed` gives them: each that has ended closes with the tokenizer's eos, and no other does."""
    rows: Sequence[Mapping[str, object]] | None = None
    """The rows of the data behind the prompts, for functions; None where no scorer needs them."""

    def at(self, places: Sequence[int]) -> "Answers":
        """Those at the given places."""
        columns = (self.prompts, self.texts, self.prompt_ids, self.response_ids, self.rows)
        return Answers(*(column and [column[i] for i in places] for column in columns))  # type: ignore[arg-type]


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
    """Gives each answer a raw score; higher is better, and only differences have a meaning."""

    @property
    def name(self) -> str:
        """The name in tables and pictures."""
        ...

    def __call__(self, answers: Answers) -> Scored:
        """One number for each answer, and for each part of it. Raises UserError where it cannot score one."""
        ...


@dataclass(frozen=True)
class Observed:
    """A scorer whose score is maximised, beside others that are only recorded: each of these is a part."""

    scorer: Scorer
    observers: Mapping[str, Scorer]

    @property
    def name(self) -> str:
        """That of the scorer."""
        return self.scorer.name

    def __call__(self, answers: Answers) -> Scored:
        """The scorer's total and parts, and the total of each observer."""
        scored = self.scorer(answers)
        return Scored(scored.total, scored.parts | {name: each(answers).total for name, each in self.observers.items()})


@dataclass(frozen=True)
class WeightedSum:
    """Several scorers: the total is the sum of weight times score. Each term is a part, and so are its parts."""

    terms: Mapping[str, tuple[float, Scorer]]
    """Weight and scorer, by name."""

    @property
    def name(self) -> str:
        """`scorer (2 × reward_model − 0.5 × length.py)`."""
        first, *rest = [f"{weight:g} × {name}" for name, (weight, _) in self.terms.items()]
        later = [f" − {term[1:]}" if term.startswith("-") else f" + {term}" for term in rest]
        return f"scorer ({first.replace('-', '−', 1) if first.startswith('-') else first}{''.join(later)})"

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


def term_weights(scorer: Scorer) -> dict[str, float]:
    """The weight of each part that is a term of the score; empty for a scorer without terms."""
    if isinstance(scorer, Observed):
        return term_weights(scorer.scorer)
    return {name: weight for name, (weight, _) in scorer.terms.items()} if isinstance(scorer, WeightedSum) else {}


def correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's correlation; None where one side does not vary or there are fewer than two values."""
    if len(first) < 2 or any(min(values) == max(values) for values in (first, second)):
        return None
    return statistics.correlation(first, second)
