"""Two or more answers to one prompt, and what says which is better: the name, side, letter or number of an answer, a
signed strength, flags for each, or ranks."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from tasks.datasets.jsonl import Row, brief, brief_names
from tasks.datasets.sources.dialogues import ShapeError, loaded

TEXT = "answer|response|completion|reply|output|generation|summary|text|conversation|candidate|human_ref"
ANSWER = re.compile(rf"({TEXT})(?:[ _-]|(?=[0-9]))([0-9]+|[a-z])", re.I)
"""Names of answers: a word and a number or a letter, such as answer1, response_b."""
CHOICE = re.compile(rf"(?:(?:{TEXT}|option|choice|model|assistant)(?:[ _-]|(?=[0-9])))?([0-9]+|[a-z])")
"""A choice that names an answer by its number or letter: `2`, `b`, `option 2`, `response_b`."""
SIDES = {"left": 0, "first": 0, "right": 1, "second": 1}
TIES = frozenset({"tie", "equal", "same", "both", "neither", "no preference", "tie (bothbad)", "both_bad", "both bad"})
STRENGTH = "preference_strength"
"""HelpSteer2: below 0 the first answer is better, above 0 the second."""
FLAGS = "winner_"
"""LMSYS: winner_model_a, winner_model_b, winner_tie, one of them true."""
VERDICTS = ("better_response_id", STRENGTH, "winner", "chosen", "preferred", "preference", "better", "best", "choice")
"""Columns that are taken for the verdict before others."""
_VERDICT_WORDS = frozenset(
    {"winner", "better", "best", "preferred", "preference", "choice", "chosen", "vote", "verdict"}
)

Verdict = str | list[list[str]] | None
"""The name of the better answer (or of a tie), a ranking (groups of equal answers, the best first), or something that
compares no answers."""


def answers_of(data: Iterable[str]) -> list[str]:
    """The columns with answers, in the order of their numbers or letters (a database may have changed the order of the
    fields); empty where none, one, or two kinds of them are found."""
    kinds: dict[str, list[tuple[int, str, str]]] = {}
    for name in data:
        if match := ANSWER.fullmatch(name):
            kinds.setdefault(match[1].casefold(), []).append((len(match[2]), match[2].casefold(), name))
    several = [names for names in kinds.values() if len(names) > 1]
    return [name for *_, name in sorted(several[0])] if len(several) == 1 else []


def ranks_of(verdict: Verdict, names: Sequence[str]) -> list[int] | None:
    """The rank of each answer, from 0; equal ranks are ties. None for a verdict that does not compare all of them."""
    if isinstance(verdict, str):
        if len(names) != 2:
            return None
        if verdict.strip().casefold() in TIES:
            return [0, 0]
        best = _position(verdict, names)
        return None if best is None else [int(place != best) for place in range(2)]
    placed = [(_position(name, names), rank) for rank, group in enumerate(verdict or []) for name in group]
    ranks = dict(placed)
    complete = len(placed) == len(names) and ranks.keys() == set(range(len(names)))
    return [ranks[place] for place in range(len(names))] if complete else None


def _position(choice: str, names: Sequence[str]) -> int | None:
    """The place of the answer that a choice names."""
    wanted, known = choice.strip().casefold(), [name.casefold() for name in names]
    if wanted in known:
        return known.index(wanted)
    if wanted in SIDES and len(names) == 2:
        return SIDES[wanted]
    match = CHOICE.fullmatch(wanted)
    endings = [found[2].casefold() if (found := ANSWER.fullmatch(name)) else None for name in names]
    return endings.index(match[1]) if match and endings.count(match[1]) == 1 else None


def pairs_of(answers: Sequence[Any], ranks: Sequence[float]) -> Iterator[tuple[int, int, bool]]:
    """For every two answers the place of the better one, of the other one, and whether they are equal. A smaller rank
    is better."""
    for one, other in combinations(range(len(answers)), 2):
        best, worst = (one, other) if ranks[one] <= ranks[other] else (other, one)
        yield best, worst, ranks[one] == ranks[other]


def verdict_columns(columns: Sequence[str], row: Row, answers: Sequence[str]) -> tuple[str, ...]:
    """The columns that say which of the answers is better, found by their names, and in this row by a value that names
    one. Raises ShapeError where there is none, or several may be meant."""
    flags = tuple(name for name in columns if name.startswith(FLAGS))
    if len(flags) > 1:
        return flags
    further = [name for name in columns if name not in answers]
    named = [name for name in VERDICTS if name in further] or [
        name for name in further if _VERDICT_WORDS & set(re.split(r"[\W_]+", name.lower()))
    ]
    named = named or [name for name in further if _names_one(row[name], answers)]
    if len(named) != 1:
        found = f"several columns that may say it ({brief_names(named)})" if named else "no verdict that is understood"
        raise ShapeError(
            f"has two answers ({brief_names(answers)}) and {found}; a column such as winner, with the name, letter or "
            "side of the better answer or tie, says which is better: `leash import --map winner=COLUMN`; where it is "
            f"always the same, --map chosen={answers[0]},rejected={answers[1]}"
        )
    return (named[0],)


def _names_one(value: object, answers: Sequence[str]) -> bool:
    """Whether a value can only be a vote: the whole name of an answer, a side, or what Label Studio writes."""
    text = str(value).strip().casefold()
    return (
        text in ("left", "right", *(name.casefold() for name in answers))
        or re.search(r"['\"]selected['\"]", text) is not None
    )


def read_verdict(row: Row, columns: Sequence[str], answers: Sequence[str]) -> list[int]:
    """The rank of each answer by these columns of a row. Raises ShapeError for a value that names none of them."""
    if len(columns) > 1:
        true = [
            name.removeprefix(FLAGS)
            for name in columns
            if str(row.get(name)).strip().casefold() in ("1", "1.0", "true")
        ]
        if len(true) == 1 and (found := ranks_of(true[0], answers)) is not None:
            return found
        raise ShapeError(f"{columns[0]} …: expected exactly one of {brief_names(columns)} to be true")
    value = row.get(columns[0])
    if (found := _ranks(value, columns[0], answers)) is None:
        raise ShapeError(
            f"{columns[0]}: {brief(value)} names none of the answers {brief_names(answers)}; expected one of them, its "
            "number or letter, left, right or tie"
        )
    return found


def _ranks(value: Any, column: str, answers: Sequence[str]) -> list[int] | None:
    value = loaded(value)  # Label Studio's CSV: [{"selected": "left"}]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Mapping):
        value = value.get("selected", value.get("choices"))
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if is_number(value):
        if column == STRENGTH:
            strength = float(value)
            return [int(strength > 0), int(strength < 0)]
        value = f"{float(value):g}"
    return ranks_of(value, answers) if isinstance(value, str) else None


def is_number(value: object) -> bool:
    """Whether a value is a number, also as text, and not NaN."""
    try:
        return isinstance(value, int | float | str) and not isinstance(value, bool) and float(value) == float(value)
    except (ValueError, OverflowError):
        return False
