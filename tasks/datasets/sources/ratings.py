"""Ratings of single answers: a further column of demonstrations, with a number for each."""

import math
from collections.abc import Iterable
from typing import Any

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import brief
from tasks.datasets.problems import Log, Problems
from tasks.datasets.sources.example import Example


def rating_of(example: Example, column: str | None) -> float | None:
    """The rating of a demonstration; None for other rows, for a row without one, and without a column. Text that spells
    a number, as in CSV files, and true and false are numbers. Raises UserError, naming file and row, for other
    values."""
    value: Any = None if column is None or example.kind != "demonstration" else example.extra.get(column)
    if value is None:
        return None
    try:
        rating = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        rating = math.nan
    if not math.isfinite(rating):
        raise UserError(
            f"{example.file}, row {example.row}: {column} is {brief(value)}, not a number; correct it, or name another "
            "column in ingest.rating_column"
        )
    return rating


def require_ratings(examples: Iterable[Example], column: str | None, log: Log) -> None:
    """Raise UserError for ratings that are no numbers; several are printed by `log`."""
    problems = Problems()
    for example in examples if column is not None else ():
        try:
            rating_of(example, column)
        except UserError as error:
            problems.add(str(error))
    problems.refuse(log)
