"""The block `scorer`: what PPO and the other methods maximise."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from rlhf_core.config.block import Block

REWARD_MODEL = "reward_model"
MADE_FOR_IT = ("preferences", "reward")
"""Stages that write empty outputs where the reward model is no term."""
FOLDER = "rewards"
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


class Term(Block):
    """A list of terms: the score of an answer is the sum of weight times term. Absent, it is the reward model alone
    with weight 1. Without the reward model, `preferences` and `reward` write empty outputs."""

    term: Annotated[str, AfterValidator(_named)]
    """`reward_model`, or a Python file below rewards/ with a function `score(prompts, responses, rows)`."""
    weight: float
    """In units of the term. It can be negative; a term with weight 0 is only logged."""


def _fit_together(terms: list[Term]) -> list[Term]:
    names = [term.term for term in terms]
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
    return [term.term for term in terms if term.term != REWARD_MODEL]
