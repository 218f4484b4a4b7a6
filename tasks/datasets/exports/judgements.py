"""Judgements of answers, as annotation tools export them, turned into rows of labelled pairs."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row, brief, brief_names
from tasks.datasets.problems import Problems
from tasks.datasets.sources.dialogues import ShapeError, parse_conversation

PROMPTS = ("prompt", "instruction", "question", "query")
TEXT = "answer|response|completion|reply|output|generation|summary|text"
ANSWER = re.compile(rf"({TEXT})(?:[ _-]|(?=[0-9]))([0-9]+|[a-z])", re.I)
"""Names of answers: a word and a number or a letter, such as answer1, response_b."""
CHOICE = re.compile(rf"(?:(?:{TEXT}|option|choice|model|assistant)(?:[ _-]|(?=[0-9])))?([0-9]+|[a-z])")
"""A choice that names an answer by its number or letter: `2`, `b`, `option 2`, `response_b`."""
SIDES = {"left": 0, "first": 0, "right": 1, "second": 1}
TIES = frozenset({"tie", "equal", "same", "both", "neither", "no preference"})

Verdict = str | list[list[str]] | None
"""The name of the better answer (or of a tie), a ranking (groups of equal answers, the best first), or something that
compares no answers."""


@dataclass(frozen=True)
class Judgement:
    """What one person said about the answers to one prompt."""

    where: str
    """File and record, for messages."""
    prompt: object
    answers: Mapping[str, str]
    """By name; the first one is the left one of two."""
    question: str
    verdict: Verdict
    label: Mapping[str, str | None]
    """The columns annotator, time and task, as far as they are known."""
    shown_in_order: bool = False
    """The tool showed the answers in this order."""


@dataclass
class Export:
    """The content of a tool's export."""

    tool: str
    judgements: list[Judgement] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """What counts as no judgement, by reason."""


def read_export(
    tool: str,
    records: Sequence[Mapping[str, Any]],
    path: str,
    judgements_of: Callable[[Mapping[str, Any], str, Export], Iterable[Judgement]],
) -> Export:
    """The judgements of all records. Raises UserError for a record of another form than `judgements_of` reads."""
    export = Export(tool)
    for number, record in enumerate(records, start=1):
        where = f"{path}, record {record.get('id') or number}"
        try:
            export.judgements += judgements_of(record, where, export)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{where}: not as {tool} exports it ({type(error).__name__}: {error}); export it again in a format "
                "that docs/how-to/own-data.md names"
            ) from None
    return export


def prompt_of(data: Mapping[str, object]) -> object:
    """The prompt of a record, or None."""
    return next((data[name] for name in PROMPTS if data.get(name)), None)


def answers_of(data: Mapping[str, object]) -> dict[str, str]:
    """The answers of a record by name, in the order of their numbers or letters (a database may have changed the order
    of the fields); empty where none, one, or two kinds of them are found."""
    kinds: dict[str, list[tuple[int, str, str]]] = {}
    for name, value in data.items():
        if (match := ANSWER.fullmatch(name)) and isinstance(value, str):
            kinds.setdefault(match[1].casefold(), []).append((len(match[2]), match[2].casefold(), name))
    several = [names for names in kinds.values() if len(names) > 1]
    return {name: str(data[name]) for *_, name in sorted(several[0])} if len(several) == 1 else {}


def label_rows(judgements: Sequence[Judgement], question: str, problems: Problems) -> Iterator[Row]:
    """A row for every two answers of every judgement of the question. What cannot be read is added to `problems`."""
    for judgement in judgements:
        if judgement.question == question:
            if problem := _problem(judgement):
                problems.add(f"{judgement.where}: {problem}")
            else:
                yield from _pairs(judgement)


def question_of(judgements: Sequence[Judgement], path: str) -> str:
    """The one question that compares the answers. Raises UserError where none does, or more than one."""
    questions = list(dict.fromkeys(judgement.question for judgement in judgements))
    ratings = {name for name in questions if _may_rate([j for j in judgements if j.question == name])}
    if len(questions) == 1:
        if ratings:
            raise UserError(
                f"{path}: {brief_names(questions)}: its numbers may be ratings; a number names an answer only where "
                "all labels are numbers of answers, or ties"
            )
        return questions[0]
    found = dict.fromkeys(j.question for j in judgements if j.answers and _ranks(j) is not None)
    comparing = [name for name in found if name not in ratings]
    if len(comparing) == 1:
        return comparing[0]
    problem = f"several questions compare the answers ({brief_names(comparing)})"
    if not comparing:
        problem = f"no question compares the answers (found: {brief_names(questions) or 'no answered question'})"
    raise UserError(f"{path}: {problem}; expected one, whose answers are the names of the texts, or left and right")


def _may_rate(judgements: Sequence[Judgement]) -> bool:
    """Whether labels of a question are numbers, and one of its labels is neither the number of an answer nor a tie."""
    of_two = [j for j in judgements if len(j.answers) == 2 and isinstance(j.verdict, str)]
    labels = [(str(j.verdict).strip(), _ranks(j)) for j in of_two]
    clear = [ranks is not None and (label.isdigit() or ranks == [0, 0]) for label, ranks in labels]
    return any(label.isdigit() for label, _ in labels) and not all(clear)


def _problem(judgement: Judgement) -> str | None:
    """What makes a judgement unreadable, and what is expected."""
    if len(judgement.answers) < 2:
        return "no answers to compare; expected a prompt and two or more texts such as answer1, answer2"
    if judgement.prompt is None:
        return f"no prompt; expected a column {', '.join(PROMPTS[:-1])} or {PROMPTS[-1]}"
    try:
        parse_conversation(judgement.prompt)
    except ShapeError as error:
        return f"prompt: {error}"
    if _ranks(judgement) is None:
        names = brief_names(judgement.answers)
        expected = "one of them, left, right or tie" if len(judgement.answers) == 2 else "a ranking of all of them"
        found = "its value" if judgement.verdict is None else brief(judgement.verdict)
        return f"{judgement.question}: {found} does not compare the answers {names}; expected {expected}"
    return None


def _ranks(judgement: Judgement) -> list[int] | None:
    """The rank of each answer, from 0; equal ranks are ties. None for a verdict that does not compare all of them."""
    names, verdict = list(judgement.answers), judgement.verdict
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


def _pairs(judgement: Judgement) -> Iterator[Row]:
    ranked = list(zip(judgement.answers.values(), _ranks(judgement) or [], strict=True))
    label = {name: value for name, value in judgement.label.items() if value is not None}
    for one, other in combinations(range(len(ranked)), 2):
        best, worst = (one, other) if ranked[one][1] <= ranked[other][1] else (other, one)
        order = {"order": [best + 1, worst + 1]} if judgement.shown_in_order else {}
        yield {
            "prompt": judgement.prompt,
            "chosen": ranked[best][0],
            "rejected": ranked[worst][0],
            "tie": ranked[best][1] == ranked[worst][1],
            **label,
            **order,
        }
