"""What people are asked to compare: the answers to one prompt, from the last run's samples or from a file, in random
order or the most uncertain first."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, repeat
from pathlib import Path
from typing import Literal

import numpy as np

from rlhf_core.config.precision import Precision
from rlhf_core.data.chat import Conversation, canonical
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import LONE_SURROGATE, Row, brief
from tasks.datasets.sources.example import Example
from tasks.datasets.sources.formats import read_rows
from tasks.datasets.sources.shapes import normalise
from tasks.params.loader import read_yaml
from tasks.stage.progress import Progress

SAMPLES = Path("data/preferences/samples.jsonl")
"""The answers of the last run, below the project's root."""
BATCH = 64
"""Answers that are scored together."""
Ask = Literal["random", "margin", "disagreement"]
Scores = Sequence[Sequence[Sequence[float]]]
"""Reward models' scores: [models][tasks][answers]."""


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
    prompts: dict[tuple[bytes, int], Conversation] = {}
    groups: dict[tuple[bytes, int], dict[str, bool]] = {}
    for example, ended in _examples(path):
        key = (canonical(example.prompt), example.row if example.kind == "pair" and size == 2 else 0)
        prompts[key] = example.prompt
        for answer, whole in zip(example.answers, example.ended or repeat(ended), strict=False):
            groups.setdefault(key, {}).setdefault(answer, whole)
    found: dict[tuple[bytes, tuple[str, ...]], Task] = {}
    for key, texts in groups.items():
        answers = list(texts)
        parts = combinations(answers, 2) if size == 2 else (answers[i : i + size] for i in range(0, len(answers), size))
        for part in parts:
            if len(part) > 1:
                task = Task(prompts[key], tuple(part), tuple(texts[answer] for answer in part))
                found.setdefault((key[0], tuple(sorted(part))), task)
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


def _examples(path: Path) -> list[tuple[Example, bool]]:
    """The rows that have answers, each with whether its answers ended; a row with `responses` counts as a row for each
    of them. Raises UserError naming file and row."""
    rows: list[tuple[int, Row]] = []
    ended: list[bool] = []
    for number, row in read_rows(path):
        given = [row]
        if "responses" in row:
            texts = row["responses"]
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or not texts:
                raise UserError(f"{path}, row {number}: responses: expected a list of texts, got {brief(texts)}")
            shared = {name: value for name, value in row.items() if name != "responses"}
            given = [{**shared, "response": text} for text in texts]
        rows += [(number, one) for one in given]
        ended += [row.get("ended") is not False] * len(given)
    examples = list(normalise(rows, str(path), heldout=False))
    for example in examples:
        if example.broken or not example.opening or not example.answers:
            raise UserError(f"{path}, row {example.row}: expected a prompt that ends with the user, and its answers")
        if LONE_SURROGATE.search("".join([*(turn["content"] for turn in example.prompt), *example.answers])):
            raise UserError(f"{path}, row {example.row}: half a surrogate pair in a text; correct the row or remove it")
    return list(zip(examples, ended, strict=True))


def shuffled(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The tasks in an order that depends on the seed only."""
    found = sorted(tasks, key=lambda task: task.id)
    random.Random(seed).shuffle(found)
    return found


def shown_order(task: str, answers: int, annotator: str, seed: int) -> list[int]:
    """The places of the answers in the order in which the page shows them to an annotator."""
    return random.Random(f"{seed}/{annotator}/{task}").sample(range(answers), answers)


def first_tasks(tasks: Sequence[Task], pairs: int) -> list[Task]:
    """As many tasks, from the first on, as give `pairs` pairs; all where these are too few."""
    before = accumulate((len(task.pairs) for task in tasks), initial=0)
    return [task for task, count in zip(tasks, before, strict=False) if count < pairs]


def reward_models(ask: Ask, folders: Sequence[Path]) -> list[Path]:
    """The reward models in the folders, whose members count as several; `random` needs none. Raises UserError for a
    folder without a reward model, and for `disagreement` with fewer than two."""
    if ask == "random":
        return []
    from rlhf_core.models.ensemble import member_folders  # with torch, which random order does not need

    for folder in folders:
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder}: no reward model here; run `leash run reward`, or name one with --reward")
    found = [member for folder in folders for member in member_folders(folder)]
    if ask == "disagreement" and len(found) < 2:
        raise UserError(
            "--ask disagreement compares reward models: give --reward FOLDER at least twice, or set reward.members"
        )
    return found


def most_uncertain(tasks: Sequence[Task], ask: Ask, models: Sequence[Path], root: Path) -> list[Task]:
    """The tasks (in random order) in the order of `ask_order`, scored by `reward_models`; `random` scores nothing."""
    if ask == "random":
        return list(tasks)
    params = read_yaml(root / "params.yaml")
    trusted = params.get("trust_remote_code") is True
    precision: Precision = "bfloat16" if params.get("precision") == "bfloat16" else "float32"
    scores = [score_tasks(tasks, folder, trusted, precision) for folder in models]
    return [tasks[place] for place in ask_order(ask, scores)]


def ask_order(ask: Ask, scores: Scores) -> list[int]:
    """The places of the tasks, the one to ask first at the beginning; equal tasks keep their order.

    `margin`: the mean over a task's pairs of |margin|, nearest 0 first; the margin of a pair is the mean over the
    models. `disagreement`: the mean over a task's pairs of the standard deviation of the margin over the models,
    largest first. Scores of one model may have any offset, but all models need the same scale.
    """
    values = []
    for answers in zip(*scores, strict=True):
        margins = np.array([[a - b for a, b in combinations(model, 2)] for model in answers])  # [models, pairs]
        uncertain = -np.abs(margins.mean(axis=0)) if ask == "margin" else margins.std(axis=0)
        values.append(float(uncertain.mean()))
    return sorted(range(len(values)), key=lambda place: -values[place])


def score_tasks(
    tasks: Sequence[Task], folder: Path, trust_remote_code: bool = False, precision: Precision = "float32"
) -> list[list[float]]:
    """The score of every answer of every task by the reward model, in this precision, with progress on stdout. Raises
    UserError for a folder that holds no reward model, and for an answer that its context does not hold."""
    from rlhf_core.data.scorer import Answers
    from rlhf_core.data.tokenizer import encode_prompt, encode_response, load_tokenizer
    from rlhf_core.models.hf import context_length, default_device, load_scalar_model, place
    from rlhf_core.models.scorers import RewardModelScorer

    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    device = default_device()
    model = load_scalar_model(folder, trust_remote_code=trust_remote_code, frozen=precision, device=device)
    pad_id, eos_id = int(tokenizer.pad_token_id), int(tokenizer.eos_token_id)
    scorer = RewardModelScorer(place(model, device), pad_id, eos_id, BATCH)
    answers = {(canonical(task.prompt), text): task.prompt for task in tasks for text in task.answers}
    progress = Progress(f"[{folder}]", len(answers), "answer", seconds=10.0)
    found: dict[tuple[bytes, str], float] = {}
    for start in range(0, len(answers), BATCH):
        keys = list(answers)[start : start + BATCH]
        prompts, texts = [answers[key] for key in keys], [text for _, text in keys]
        prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        response_ids = [encode_response(tokenizer, text, ended=False) for text in texts]  # the scorer adds the end
        longest = max(len(prompt) + len(response) for prompt, response in zip(prompt_ids, response_ids, strict=True))
        if longest > context_length(model):
            raise UserError(
                f"{folder}: a prompt with its answer has {longest} tokens, and the model's context holds "
                f"{context_length(model)}; shorten the text, or use --ask random"
            )
        found |= zip(keys, scorer(Answers(prompts, texts, prompt_ids, response_ids)).total, strict=True)
        progress.update(len(found))
    return [[found[canonical(task.prompt), text] for text in task.answers] for task in tasks]
