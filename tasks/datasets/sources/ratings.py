"""Ratings of single answers: a further column of demonstrations, with a number for each; or good and bad answers
(`label` true or false)."""

import math
from collections.abc import Iterable
from typing import Any

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import brief
from tasks.datasets.problems import Log, Problems
from tasks.datasets.sources.example import Example
from tasks.datasets.sources.shapes import LABELS


def rating_of(example: Example, column: str | None) -> float | None:
    """The rating of a demonstration in this column, or without one its label; None for other rows, and for a row
    without a rating. Text that spells a number, as in CSV files, and true and false are numbers. Raises UserError,
    naming file and row, for other values."""
    if column is None or (column in LABELS and example.rating is not None):
        return example.rating
    value: Any = None if example.kind != "demonstration" else example.extra.get(column)
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


def mark_low(examples: Iterable[Example], column: str | None, above: float | None) -> tuple[float, int] | None:
    """Mark the rated demonstrations that are too low to imitate: all that are not `above`, by default halfway between
    the lowest and the highest rating. Returns the limit and how many are imitated; None without ratings. Ratings must
    be numbers, see `require_ratings`."""
    rated = [(example, rating) for example in examples if (rating := rating_of(example, column)) is not None]
    if not rated:
        return None
    values = [rating for _, rating in rated]
    if above is not None:
        limit = above
    elif set(values) <= {0.0, 1.0}:
        limit = 0.5
    else:
        limit = (min(values) + max(values)) / 2 if min(values) < max(values) else -math.inf
    for example, rating in rated:
        example.low = rating <= limit
    return limit, sum(not example.low for example, _ in rated)


def require_ratings(examples: Iterable[Example], column: str | None, log: Log) -> None:
    """Raise UserError for ratings that are no numbers; several are printed by `log`."""
    problems = Problems()
    for example in examples if column is not None else ():
        try:
            rating_of(example, column)
        except UserError as error:
            problems.add(str(error))
    problems.refuse(log)
