"""What people are asked to compare: the answers to one prompt, from the last run's samples or from a file."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, repeat
from pathlib import Path

from rlhf_core.data.chat import Conversation, canonical
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row, brief, iter_jsonl
from tasks.datasets.sources.example import Example
from tasks.datasets.sources.shapes import normalise

SAMPLES = Path("data/preferences/samples.jsonl")
"""The answers of the last run, below the project's root."""


@dataclass(frozen=True)
class Task:
    """Answers to one prompt, to be compared or ranked."""

    prompt: Conversation
    answers: tuple[str, ...]
    """Different texts."""
    ended: tuple[bool, ...]
    """For each answer False where the model reached its token limit."""
    right: int | None = None
    """Of a gold question: the place in `answers` of the better one."""

    @property
    def id(self) -> str:
        """16 hexadecimal digits; equal prompts with equal answers have the same id."""
        content = canonical(self.prompt) + json.dumps([self.answers, self.right]).encode()
        return hashlib.sha256(content).hexdigest()[:16]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Places of every two answers."""
        return list(combinations(range(len(self.answers)), 2))


def read_tasks(path: Path, size: int) -> list[Task]:
    """All tasks of `size` answers that a file gives, each once. For size 2 these are all pairs of a prompt's answers
    (of rows that are pairs, these pairs); a larger size divides the answers, so the last task of a prompt may have
    fewer, but at least two. Raises UserError naming file and row."""
    groups: dict[tuple[bytes, int], dict[str, bool]] = {}
    prompts: dict[tuple[bytes, int], Conversation] = {}
    for example, ended in _examples(path):
        prompt = example.prompt
        key = (canonical(prompt), example.row if example.kind == "pair" and size == 2 else 0)
        prompts[key] = prompt
        for answer, whole in zip(example.answers, example.ended or repeat(ended), strict=False):
            groups.setdefault(key, {}).setdefault(answer, whole)
    found: dict[tuple[bytes, tuple[str, ...]], Task] = {}
    for key, texts in groups.items():
        for answers in _parts(list(texts), size):
            task = Task(prompts[key], tuple(answers), tuple(texts[answer] for answer in answers))
            found.setdefault((key[0], tuple(sorted(answers))), task)
    if not groups:
        raise UserError(f"{path}: no rows, so there is nothing to compare; fill the file, or name another with --from")
    if not found:
        raise UserError(f"{path}: no prompt has two different answers, so there is nothing to compare")
    return list(found.values())


def read_gold(path: Path) -> list[Task]:
    """The gold questions of a file of pairs; chosen is the right answer. Raises UserError for any other row."""
    found: dict[str, Task] = {}
    for example, _ in _examples(path):
        if example.chosen is None or example.rejected is None or example.chosen == example.rejected:
            raise UserError(f"{path}, row {example.row}: a gold question needs prompt, chosen and another rejected")
        task = Task(example.prompt, (example.chosen, example.rejected), (True, True), right=0)
        found[task.id] = task
    if not found:
        raise UserError(f"{path}: no rows; fill the file, or leave --gold out")
    return list(found.values())


def shuffled(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The tasks in an order that depends on the seed only."""
    found = sorted(tasks, key=lambda task: task.id)
    random.Random(seed).shuffle(found)
    return found


def first_tasks(tasks: Sequence[Task], pairs: int) -> list[Task]:
    """As many tasks, from the first on, as give `pairs` pairs; all where these are too few."""
    found: list[Task] = []
    for task in tasks:
        if pairs <= 0:
            break
        found.append(task)
        pairs -= len(task.pairs)
    return found


def shown_order(task: str, answers: int, annotator: str, seed: int) -> list[int]:
    """The places of the answers in the order in which the page shows them to an annotator."""
    return random.Random(f"{seed}/{annotator}/{task}").sample(range(answers), answers)


def _parts(answers: list[str], size: int) -> list[Sequence[str]]:
    if size == 2:
        return list(combinations(answers, 2))
    parts = [answers[start : start + size] for start in range(0, len(answers), size)]
    return [part for part in parts if len(part) > 1]


def _examples(path: Path) -> list[tuple[Example, bool]]:
    """The rows that have answers, each with whether its answers ended. Raises UserError naming file and row."""
    rows: list[tuple[int, Row]] = []
    ended: list[bool] = []
    for number, row in iter_jsonl(path, allow_halves=False):
        answers = _responses(row, f"{path}, row {number}")
        for answer in answers:
            rows.append((number, answer))
            ended.append(row.get("ended") is not False)
    examples = list(normalise(rows, str(path), heldout=False))
    for example in examples:
        if example.broken or not example.opening or not example.answers:
            raise UserError(f"{path}, row {example.row}: expected a prompt that ends with the user, and its answers")
    return list(zip(examples, ended, strict=True))


def _responses(row: Row, where: str) -> list[Row]:
    """A row for each of `responses`; any other row as it is."""
    if "responses" not in row:
        return [row]
    texts = row["responses"]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or not texts:
        raise UserError(f"{where}: responses: expected a list of texts, got {brief(texts)}")
    shared = {name: value for name, value in row.items() if name != "responses"}
    return [{**shared, "response": text} for text in texts]
