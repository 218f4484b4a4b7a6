"""Which tasks people are asked first: in random order, or those about which reward models are uncertain."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from flows.commands.annotate.tasks import Task
from rlhf_core.config.precision import Precision
from rlhf_core.data.chat import Conversation, canonical
from rlhf_core.errors import UserError
from tasks.params.loader import read_yaml
from tasks.stage.progress import Progress

if TYPE_CHECKING:  # random order needs no torch
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.models.scorers import Answers

Ask = Literal["random", "margin", "disagreement"]
BATCH = 64
"""Answers that are scored together."""

Scores = Sequence[Sequence[Sequence[float]]]
"""Reward models' scores: [models][tasks][answers]."""
Key = tuple[bytes, str]
"""A prompt and an answer."""
Answer = tuple[Conversation, str, bool]
"""A prompt, an answer, and whether it ended."""


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


def most_uncertain(tasks: Sequence[Task], ask: Ask, folders: Sequence[Path], root: Path) -> list[Task]:
    """The tasks (in random order) in the order of `ask_order`, scored by the reward models in `folders`; `random`
    scores nothing. A folder with several members counts as several. Raises UserError for a folder without a reward
    model, and for `disagreement` with fewer than two."""
    if ask == "random":
        return list(tasks)
    from rlhf_core.models.ensemble import member_folders

    for folder in folders:
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder}: no reward model here; run `leash run reward`, or name one with --reward")
    folders = [member for folder in folders for member in member_folders(folder)]
    if ask == "disagreement" and len(folders) < 2:
        raise UserError(
            "--ask disagreement compares reward models: give --reward FOLDER at least twice, or set reward.members"
        )
    params = read_yaml(root / "params.yaml")
    trusted = params.get("trust_remote_code") is True
    precision: Precision = "bfloat16" if params.get("precision") == "bfloat16" else "float32"
    scores = [score_tasks(tasks, folder, trusted, precision) for folder in folders]
    return [tasks[place] for place in ask_order(ask, scores)]


def score_tasks(
    tasks: Sequence[Task], folder: Path, trust_remote_code: bool = False, precision: Precision = "float32"
) -> list[list[float]]:
    """The score of every answer of every task by the reward model, in this precision, with progress on stdout. Raises
    UserError for a folder that holds no reward model, and for an answer that its context does not hold."""
    from rlhf_core.data.tokenizer import load_tokenizer
    from rlhf_core.models.hf import context_length, default_device, load_scalar_model, place
    from rlhf_core.models.scorers import RewardModelScorer

    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    device = default_device()
    model = load_scalar_model(folder, trust_remote_code=trust_remote_code, frozen=precision, device=device)
    place(model, device)
    scorer = RewardModelScorer(model, int(tokenizer.pad_token_id), BATCH)
    answers: dict[Key, Answer] = {}
    for task in tasks:
        for text, ended in zip(task.answers, task.ended, strict=True):
            answers.setdefault((canonical(task.prompt), text), (task.prompt, text, ended))
    progress = Progress(f"[{folder}]", len(answers), "answer", seconds=10.0)
    found: dict[Key, float] = {}
    for keys in _batches(list(answers)):
        encoded = _encode(tokenizer, [answers[key] for key in keys])
        ids = zip(encoded.prompt_ids, encoded.response_ids, strict=True)
        longest = max(len(prompt) + len(response) for prompt, response in ids)
        if longest > context_length(model):
            raise UserError(
                f"{folder}: a prompt with its answer has {longest} tokens, and the model's context holds "
                f"{context_length(model)}; shorten the text, or use --ask random"
            )
        found |= zip(keys, scorer(encoded).total, strict=True)
        progress.update(len(found))
    return [[found[canonical(task.prompt), text] for text in task.answers] for task in tasks]


def _batches(keys: list[Key]) -> Iterator[list[Key]]:
    return (keys[start : start + BATCH] for start in range(0, len(keys), BATCH))


def _encode(tokenizer: "PreTrainedTokenizerBase", answers: Sequence[Answer]) -> "Answers":
    from rlhf_core.data.tokenizer import encode_prompt, encode_response
    from rlhf_core.models.scorers import Answers

    return Answers(
        [prompt for prompt, _, _ in answers],
        [text for _, text, _ in answers],
        [encode_prompt(tokenizer, prompt) for prompt, _, _ in answers],
        [encode_response(tokenizer, text, ended) for _, text, ended in answers],
    )
