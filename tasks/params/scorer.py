"""The block `scorer`: what PPO and the other methods maximise."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rlhf_core.config.block import Block
from rlhf_core.config.paths import FolderName
from rlhf_core.config.precision import Precision

REWARD_MODEL = "reward_model"
MADE_FOR_IT = ("preferences", "reward")
"""Stages that write empty outputs where the reward model is no term."""
FOLDER = "rewards"
JUDGES = "models/judges"
"""Folder of the user's models that judge or score."""
PARTS = (REWARD_MODEL, "std", "judge", "end")
"""Names of other columns of scores, which no folder of a term can have."""
DEFAULT: list[dict[str, Any]] = [{"term": REWARD_MODEL, "weight": 1.0}]
FILE = re.compile(r"(\w[\w.-]*/)*\w[\w.-]*\.py", re.ASCII)


def _python_file(value: str) -> str:
    if not FILE.fullmatch(value):
        raise ValueError(
            f"must be the path of a Python file below {FOLDER}/, such as exact.py (ASCII letters, digits, `_`, `-` and "
            "`.`; no absolute path, no `..`)"
        )
    return value


PythonFile = Annotated[str, AfterValidator(_python_file)]
"""A Python file below rewards/ with a function `score(prompts, responses, rows)`."""


def _named(value: str) -> str:
    if value != REWARD_MODEL and not FILE.fullmatch(value):
        raise ValueError(
            f"must be {REWARD_MODEL}, or the path of a Python file below {FOLDER}/, such as exact.py (ASCII letters, "
            "digits, `_`, `-` and `.`; no absolute path, no `..`)"
        )
    return value


class TextModel(Block):
    """How a model from elsewhere reads an answer: a sequence classifier with its own tokenizer."""

    label: str | None = None
    """For a model with several outputs: the label, as in its config.json, whose log-odds are the score."""
    reads: Literal["answer", "pair"] | None = None
    """What the model reads. null: the conversation in its chat template; with `base.format: text`, prompt and answer as
    one text. `answer`: the answer alone. `pair`: prompt and answer as a text pair."""
    precision: Precision | None = None
    """Of the model. null: that of the run."""


class Term(TextModel):
    """A list of terms; the score of an answer is the sum of weight × term. Default: the reward model with weight 1.
    Without `term: reward_model`, no reward model is trained. `label`, `reads` and `precision` are for a `model`."""

    term: Annotated[str, AfterValidator(_named)] | None = None
    """`reward_model`, or a Python file below rewards/ with a function `score(prompts, responses, rows)`."""
    model: FolderName | None = None
    """Instead of `term`: folder below models/judges/ with a reward model or classifier from elsewhere."""
    weight: float
    """May be negative. 0: the term is only logged."""

    @property
    def name(self) -> str:
        """In tables and logs: the term, or the folder of the model."""
        return self.term or self.model or ""

    @model_validator(mode="after")
    def _is_one(self) -> "Term":
        if (self.term is None) == (self.model is None):
            raise ValueError(
                f"needs either term or model: {REWARD_MODEL}, a file below {FOLDER}/, or a folder below {JUDGES}/"
            )
        if self.model in PARTS:
            raise ValueError(f"model: {self.model} is the name of another score; rename the folder")
        if self.model is None and any((self.label, self.reads, self.precision)):
            raise ValueError(f"label, reads and precision are for a model below {JUDGES}/; remove them")
        return self


def _fit_together(terms: list[Term]) -> list[Term]:
    names = [term.name for term in terms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the term {twice[0]} occurs twice; give it one weight")
    if not any(term.weight for term in terms):
        raise ValueError("no term has a weight other than 0; give one a weight")
    return terms


Terms = Annotated[list[Term], AfterValidator(_fit_together)]


def default_terms() -> list[Term]:
    """The reward model alone."""
    return [Term(**term) for term in DEFAULT]


class ScorerParams(Block):
    """The block as stages read it."""

    scorer: Terms = Field(default_factory=default_terms)


def is_reward_model(terms: Sequence[Term]) -> bool:
    """Whether the score is that of the reward model, and nothing else."""
    return [(term.term, term.weight) for term in terms] == [(REWARD_MODEL, 1.0)]


def uses_reward_model(terms: Sequence[Term]) -> bool:
    """Whether the reward model is one of the terms."""
    return any(term.term == REWARD_MODEL for term in terms)


def functions(terms: Sequence[Term]) -> list[str]:
    """The files of the terms that are functions."""
    return [term.term for term in terms if term.term and term.term != REWARD_MODEL]
