"""Which pairs to ask people for: at random, by the margin of a reward model, or by the disagreement of several.

    python benchmarks/which_pairs.py --seeds 1,2,3 --labels 100,200,400,800

Needs a finished run of the demo in this clone: models/sft, data/preferences/samples.jsonl and params.yaml. All choices
start with the same random pairs. In each later round `leash annotate` chooses the new pairs by the reward models of the
labels so far. Simulated annotators with the noise of `preferences.annotators` answer over its HTTP interface, and the
rows of `leash annotate --export` are the training data. A tie is a label, too, but trains nothing. The table is
Markdown: accuracy on the pairs of the validation prompts, which the rubric labels without noise.
"""

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from numpy import ndarray
from transformers import PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flows.commands.annotate.tasks import SAMPLES, Task, read_tasks
from flows.commands.study.tables import standard_error, summarise
from flows.environment import find_root
from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.chat import Conversation, canonical
from rlhf_core.data.scorer import Answers
from rlhf_core.data.tokenizer import encode_prompt, encode_response, load_tokenizer
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.evaluation.intervals import clustered_interval
from rlhf_core.evaluation.judges import NoisyAnnotators, RubricJudge
from rlhf_core.models.hf import place, save_checkpoint, scalar_model_from
from rlhf_core.reward import Comparison, score_pairs, train_reward_model
from rlhf_core.training.run import Run
from tasks.datasets.jsonl import Row, iter_jsonl, write_jsonl
from tasks.params.loader import parse, read_yaml
from tasks.params.preferences import AnnotatorParams
from tasks.stage.progress import Progress
from tasks.stage.run import quiet_libraries

CHOICES = {"random": 0, "margin": 1, "disagreement": 3}
"""How many reward models each choice reads; the first one is measured."""
EXACT = NoisyAnnotators(RubricJudge(), temperature=0.0, flip_rate=0.0, seed=0)
RESAMPLES = 2000


def prefers(annotators: NoisyAnnotators, prompt: Conversation, a: str, b: str, *key: int) -> bool | None:
    """Whether they choose `a`; None for a tie."""
    return annotators.choose(*annotators.judge(Answers([prompt, prompt], [a, b])).total, key)


def main() -> None:
    """Run the study, print its table, and write all numbers to which_pairs.json."""
    options = arguments().parse_args()
    quiet_libraries()
    study = prepare(find_root(), options.folder.absolute(), options.labels)
    progress = Progress("[which_pairs]", len(options.seeds) * len(CHOICES) * len(options.labels), "point", seconds=0.0)
    points: list[Point] = []
    for seed in options.seeds:
        for point in run_seed(study, seed, options.labels):
            points.append(point)
            progress.update(len(points), seed=seed, labels=point.labels, accuracy=point.right.mean())
    rows = summaries(study, points)
    content = {"points": [{**vars(p), "right": float(p.right.mean())} for p in points], "summaries": rows}
    (study.folder / "which_pairs.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=rising, default=[1, 2, 3], help="of the pairs, the annotators and the models")
    parser.add_argument("--labels", type=rising, default=[100, 200, 400, 800], help="labels after each round")
    parser.add_argument("--folder", type=Path, default=Path("work/which_pairs"), help="new, for sessions and numbers")
    return parser


def rising(text: str) -> list[int]:
    """Rising whole numbers by commas. Raises ValueError for anything else."""
    found = [int(part) for part in text.split(",")]
    if found != sorted(set(found)) or found[0] < 1:
        raise ValueError(text)
    return found


@dataclass(frozen=True)
class Study:
    """What all seeds and choices share."""

    folder: Path
    sft: Path
    tokenizer: PreTrainedTokenizerBase
    reward: RewardConfig
    annotators: AnnotatorParams
    pool: list[Task]
    """The pairs that can be asked for."""
    heldout: list[Comparison]


def prepare(root: Path, folder: Path, labels: Sequence[int]) -> Study:
    """Read the finished run in `root` and make `folder` a project of its own for the sessions. Raises UserError for a
    run that is missing or not of the demo, a folder that is not empty, and too many labels."""
    params, sft, samples = read_yaml(root / "params.yaml"), root / "models/sft", root / SAMPLES
    if not samples.is_file() or not (sft / "config.json").is_file():
        raise UserError(f"{samples} or {sft}: not found; run `leash run preferences` first")
    if params["ingest"]["source"] != "demo":
        raise UserError("params.yaml: ingest.source: the simulated annotators need the rubric of the demo")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: not empty; remove it, or name another --folder")
    pool, validation = (tasks_of(samples, split) for split in ("train", "validation"))
    if labels[-1] > len(pool):
        raise UserError(f"--labels {labels[-1]}: the training prompts have {len(pool):,} pairs; name fewer")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    (folder / "params.yaml").write_text("trust_remote_code: false\n", encoding="utf-8")
    tokenizer = load_tokenizer(sft)
    heldout = comparisons(tokenizer, [exact_row(task) for task in validation])
    reward = parse(RewardConfig, params["reward"], "reward")
    noise = parse(AnnotatorParams, params["preferences"]["annotators"], "preferences.annotators")
    return Study(folder, sft, tokenizer, reward, noise, pool, heldout)


def tasks_of(samples: Path, split: str) -> list[Task]:
    """All pairs of a split's samples."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for _, row in iter_jsonl(samples, allow_halves=False) if row["split"] == split]
        write_jsonl(path := Path(folder) / samples.name, rows)
        return read_tasks(path, 2)


def exact_row(task: Task) -> Row:
    """A pair with the label of the rubric, as `leash annotate --export` writes it."""
    wins = prefers(EXACT, task.prompt, *task.answers)
    return {**as_pair(task, swapped=wins is False), "tie": wins is None}


def as_pair(task: Task, swapped: bool = False) -> Row:
    """A row of two answers, the first one as the chosen one unless `swapped`."""
    chosen, rejected = (1, 0) if swapped else (0, 1)
    return {
        "prompt": task.prompt,
        "chosen": task.answers[chosen],
        "rejected": task.answers[rejected],
        "chosen_ended": task.ended[chosen],
        "rejected_ended": task.ended[rejected],
    }


def comparisons(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> list[Comparison]:
    """The pairs as token ids, all of a prompt together; ties are left out."""
    found: dict[bytes, Comparison] = {}
    for row in (row for row in rows if not row["tie"]):
        new = Comparison(encode_prompt(tokenizer, row["prompt"]), [], [])
        comparison = found.setdefault(canonical(row["prompt"]), new)
        sides = [encode_response(tokenizer, row[side]) for side in ("chosen", "rejected")]
        comparison.responses.extend(ids for ids in sides if ids not in comparison.responses)
        better, worse = map(comparison.responses.index, sides)
        comparison.pairs.append((better, worse))
    return list(found.values())


@dataclass(frozen=True)
class Point:
    """The reward model of one choice and seed after a number of labels."""

    choice: str
    seed: int
    labels: int
    ties: int
    wrong: int
    """Labels against the rubric."""
    prompts: int
    """Prompts with a label that is no tie."""
    right: ndarray
    """For each held-out pair 1 where the model orders it as the rubric does, ½ for equal scores, else 0."""


def run_seed(study: Study, seed: int, labels: Sequence[int]) -> Iterator[Point]:
    """The points of all choices; the first point of each is the same model."""
    start = ask(study, "random", seed, [], labels[0], [])
    first, models = train_and_measure(study, "random", seed, start, max(CHOICES.values()))
    for choice, reads in CHOICES.items():
        yield replace(first, choice=choice)
        rows, folders = start, models
        for wanted in labels[1:]:
            rows = rows + ask(study, choice, seed, rows, wanted, folders[:reads])
            point, folders = train_and_measure(study, choice, seed, rows, 1 if wanted == labels[-1] else max(1, reads))
            yield point


def train_and_measure(
    study: Study, choice: str, seed: int, rows: Sequence[Row], models: int
) -> tuple[Point, list[Path]]:
    """Train reward models with different seeds, and measure the first. Also returns their folders."""
    training, pad_id = comparisons(study.tokenizer, rows), int(study.tokenizer.pad_token_id)
    folders = [study.folder / "models" / f"{choice}-{seed}-{len(rows)}-{member}" for member in range(models)]
    for member, folder in reversed(list(enumerate(folders))):  # the first one is measured, so it comes last
        own = 100 * seed + member
        make_deterministic(own, threads=1)
        model = scalar_model_from(study.sft, own)
        with tempfile.TemporaryDirectory() as state:
            run = Run(Path(state), own, report=lambda *_: None, checkpoint_every=10**9)
            train_reward_model(model, training, study.reward, pad_id, run)
        save_checkpoint(folder, model.cpu(), study.tokenizer)
    scores = score_pairs(place(model), study.heldout, pad_id, study.reward.batch_size)
    kept = [row for row in rows if not row["tie"]]
    wrong = sum(prefers(EXACT, row["prompt"], row["chosen"], row["rejected"]) is False for row in kept)
    return Point(
        choice, seed, len(rows), len(rows) - len(kept), wrong, len(training), scores.right.double().numpy()
    ), folders


def ask(study: Study, choice: str, seed: int, known: list[Row], wanted: int, rewards: Sequence[Path]) -> list[Row]:
    """New labels, so that there are `wanted` with the known ones. They come from a session of `leash annotate` over all
    pairs without a label."""
    name = f"{choice}-{seed}-{wanted}"
    source, labels = study.folder / f"{name}.jsonl", study.folder / f"{name}-labels.jsonl"
    asked = {row["task"] for row in known}
    tasks = [task for task in study.pool if task.id not in asked]
    write_jsonl(source, map(as_pair, tasks))
    options = ["--from", source, "--ask", choice, "--pairs", wanted - len(known), "--seed", seed]
    options += [word for folder in rewards for word in ("--reward", folder)]
    noise = study.annotators
    with serving(study.folder, name, options) as address:
        label(address, NoisyAnnotators(RubricJudge(), noise.temperature, noise.flip_rate, seed))
    with annotate(study.folder, name, ["--export", labels]) as process:
        printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(printed)
    return [row for _, row in iter_jsonl(labels, allow_halves=False)]


def annotate(folder: Path, name: str, options: Sequence[object]) -> "subprocess.Popen[str]":
    """Start `leash annotate` of this clone on one thread."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "flows.cli", "annotate", "--name", name, *map(str, options)]
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@contextmanager
def serving(folder: Path, name: str, options: Sequence[object]) -> Iterator[str]:
    """The address that the command prints; its server runs within the block. Raises RuntimeError where it does not."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with annotate(folder, name, [*options, "--annotators", "simulated", "--port", port]) as process:
        assert process.stdout is not None
        printed = []
        try:
            for line in process.stdout:
                printed.append(line)
                if "/?token=" in line:
                    break
            else:
                raise RuntimeError("".join(printed))
            yield line.split(": ", 1)[1].strip()
        finally:
            process.terminate()


def label(address: str, annotators: NoisyAnnotators) -> None:
    """Judge all tasks of a session through the interface of its page."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    headers = {"Authorization": f"Bearer {parse_qs(parts.query)['token'][0]}", "Content-Type": "application/json"}

    def call(method: str, path: str, content: object = None) -> dict[str, Any]:
        connection.request(method, path, json.dumps(content), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{method} {path}: {response.status} {response.read().decode()}")
        return dict(json.load(response))

    view = call("GET", "/api/view")
    while (task := view["task"]) is not None:
        prompt: Conversation = [{"role": turn["role"], "content": turn["text"]} for turn in task["prompt"]]
        first, second = (answer["text"] for answer in task["answers"])
        wins = prefers(annotators, prompt, first, second, int(task["id"], 16))
        verdict = {"action": "tie"} if wins is None else {"action": "rank", "ranking": [0, 1] if wins else [1, 0]}
        view = call("POST", "/api/judge", {"task": task["id"], **verdict})


def summaries(study: Study, points: Sequence[Point]) -> list[dict[str, Any]]:
    """For each number of labels and choice: means over the seeds, of accuracy and of its difference to `random` (paired
    by seed and held-out pair) as mean, low and high; None where no pair differs."""
    owners = np.repeat(np.arange(len(study.heldout)), [len(comparison.pairs) for comparison in study.heldout])
    rows = []
    for labels in dict.fromkeys(point.labels for point in points):
        groups = {choice: [p for p in points if (p.labels, p.choice) == (labels, choice)] for choice in CHOICES}
        right = {choice: np.stack([point.right for point in group]) for choice, group in groups.items()}
        for choice, group in groups.items():
            less = right[choice] - right["random"]
            figures = over_seeds(right[choice], owners), over_seeds(less, owners) if less.any() else None
            row = {"labels": labels, "choice": choice, "accuracy": figures[0], "less_random": figures[1]}
            names = ("ties", "wrong", "prompts")
            rows.append(row | {name: fmean(getattr(point, name) for point in group) for name in names})
    return rows


def over_seeds(values: ndarray, owners: ndarray) -> list[float | None]:
    """Mean and 95% interval, as `leash study` makes it, of values [seeds, held-out pairs]; `owners`: their prompts. The
    interval is None, None with one seed and no variance between prompts."""
    errors = [standard_error(clustered_interval(row, owners, RESAMPLES, seed=1)) for row in values]
    found = summarise(values.mean(axis=1).tolist(), errors)
    assert found is not None
    return [found.mean, found.low, found.high]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| labels | choice | accuracy | less random | ties | wrong | prompts |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [str(row["labels"]), row["choice"]]
        for name, sign in (("accuracy", ""), ("less_random", "+")):
            mean, low, high = row[name] or (None, None, None)
            interval = "" if low is None else f" ({low:.3f} – {high:.3f})"
            cells.append("–" if mean is None else f"{mean:{sign}.3f}{interval}")
        cells += [f"{row[name]:.0f}" for name in ("ties", "wrong", "prompts")]
        lines.append(f"| {' | '.join(cells)} |".replace("-", "−"))
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
