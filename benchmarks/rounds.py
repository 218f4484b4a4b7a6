"""Rounds against one round: the same prompts labelled in several rounds, or all at once.

    python benchmarks/rounds.py --seeds 1,2,3 --rounds 3

Each seed has a single round with all prompts and, for each `--reference`, several rounds with an equal share of them.
A run works in a workspace of its own (work/runs/) at the commit of HEAD, with the alternatives to PPO switched off; its
rounds are closed by `leash round`. A killed study continues with the same command, at the commit at which it began. The
table is Markdown: means over the seeds with 95% intervals that contain prompts and seeds, and in brackets the value of
each seed. `work/rounds/` has metrics/evaluate.json and all answers of each round.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flows import workspace
from flows.commands.study.tables import standard_error, summarise
from flows.environment import find_root
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from rlhf_core.evaluation.frontier import lead_at_equal_kl
from rlhf_core.evaluation.intervals import Estimate
from tasks.datasets.jsonl import read_jsonl
from tasks.page.inputs import interval
from tasks.params.loader import read_yaml
from tasks.params.methods import METHODS
from tasks.stage.rounds import last_closed

SINGLE = "single"
KEPT = ("metrics/evaluate.json", "metrics/reward.json", "metrics/preferences.json", "data/evaluate/answers.jsonl")
SOMEBODY = ("-c", "user.name=leash", "-c", "user.email=leash@localhost")
RESAMPLES = 2000


def main() -> None:
    """Run what is missing, and print the table."""
    options = arguments().parse_args()
    root = find_root()
    if read_yaml(root / "params.yaml")["ingest"]["source"] != "demo":
        raise UserError("params.yaml: ingest.source: the gold score needs the demo's data")
    arms = [SINGLE, *(options.reference or ["sft"])]
    folder = root / options.folder
    commit = commit_of(folder, workspace.resolve(root, "HEAD"), {"rounds": options.rounds, "set": options.set})
    for seed in options.seeds:
        for arm in arms:
            play(root, folder, commit, arm, seed, 1 if arm == SINGLE else options.rounds, options.set)
    print(table(folder, arms, options.seeds, options.rounds))


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each with an equal share of the prompts")
    parser.add_argument(
        "--reference", action="append", choices=("sft", "previous"), help="of the KL, default sft; may be given twice"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter of every run")
    parser.add_argument("--folder", type=Path, default=Path("work/rounds"), help="for results; a study has its own")
    return parser


def commit_of(folder: Path, commit: str, call: dict[str, Any]) -> str:
    """The commit at which the study in this folder began; a new one begins at `commit`. Raises UserError for a study
    that was called in another way."""
    path = folder / "study.json"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**call, "commit": commit}) + "\n", encoding="utf-8")
    begun: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if begun != {**call, "commit": begun["commit"]}:
        raise UserError(f"{path}: a study with other --rounds or --set; remove the folder, or name another --folder")
    return str(begun["commit"])


def place_of(folder: Path, arm: str, seed: int, number: int) -> Path:
    """Where the results of a round are kept."""
    return folder / f"{arm}-{seed}" / str(number)


def play(root: Path, folder: Path, commit: str, arm: str, seed: int, count: int, extra: Sequence[str]) -> None:
    """Run the rounds of an arm whose results are not kept yet; the workspace is removed when all are."""
    if all(place_of(folder, arm, seed, number).is_dir() for number in range(1, count + 1)):
        return
    reference = "sft" if arm == SINGLE else arm
    space = Workspace(root, f"rounds-{arm}-{seed}", commit, overrides(root, seed, count, reference, extra))
    with workspace.opened(space):
        for number in range(last_closed(space.root) + 1, count + 1):
            print(f"{arm}, seed {seed}: round {number} of {count}", flush=True)
            leash(space, "run")
            record(space, f"round {number}")
            keep(space, place_of(folder, arm, seed, number))
            if number < count:
                leash(space, "round")
                record(space, f"Close round {number}")
        workspace.remove(space)


def overrides(root: Path, seed: int, count: int, reference: str, extra: Sequence[str]) -> tuple[str, ...]:
    """The parameters of a run: no tracking, no method beside PPO."""
    params = read_yaml(root / "params.yaml")
    others = [method.name for method in METHODS if params[method.name]["enabled"]]
    switched = ["runtime.tracking=false", *(f"{name}.enabled=false" for name in others)]
    return (f"seed={seed}", f"++round.share={1 / count:.9f}", f"++round.reference={reference}", *switched, *extra)


def leash(space: Workspace, *words: str) -> None:
    """Run a command of the workspace's code. Raises UserError where it fails."""
    changed = {**os.environ, **workspace.environment(space.root)}
    env = {name: value for name, value in changed.items() if value is not None}
    done = subprocess.run([sys.executable, "-m", "flows.cli", *words], cwd=space.root, env=env, check=False)
    if done.returncode:
        raise UserError(f"`leash {' '.join(words)}` failed in {space.root}; the same command continues")


def record(space: Workspace, message: str) -> None:
    """Commit what there is to commit, on no branch."""
    workspace.git(space.root, "add", "--all")
    if workspace.git(space.root, "status", "--porcelain"):
        workspace.git(space.root, *SOMEBODY, "commit", "--quiet", "--message", message)


def keep(space: Workspace, target: Path) -> None:
    """Copy the results of a round, unless they are kept already; complete or absent."""
    if target.is_dir():
        return
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name in KEPT:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(space.root / name, partial / name)
    partial.replace(target)


@dataclass(frozen=True)
class Round:
    """The results of a round."""

    folder: Path

    def metrics(self, stage: str) -> dict[str, Any]:
        """metrics/<stage>.json."""
        content: dict[str, Any] = json.loads((self.folder / "metrics" / f"{stage}.json").read_text(encoding="utf-8"))
        return content

    @cached_property
    def answers(self) -> dict[str, dict[str, ndarray]]:
        """By model: gold score and KL to SFT (nats), the mean of each prompt's answers."""
        found: dict[str, dict[str, dict[str, list[float]]]] = {}
        for row in read_jsonl(self.folder / "data/evaluate/answers.jsonl"):
            for name in ("gold", "kl"):
                found.setdefault(row["model"], {}).setdefault(name, {}).setdefault(row["prompt_id"], []).append(
                    row[name]
                )
        return {
            model: {
                name: np.array([np.mean(by_prompt[one]) for one in sorted(by_prompt)])
                for name, by_prompt in both.items()
            }
            for model, both in found.items()
        }

    def lead(self, other: "Round") -> Estimate | None:
        """Gold of the frontier of these rounds (SFT, the policies of the earlier ones, and this one's) minus that of
        the other round's policy, at its KL. None beyond the rounds' KL."""
        policies = [model for model in self.answers if model in ("sft", "policy") or model.startswith("round_")]
        curve = [np.stack([self.answers[model][name] for model in policies]) for name in ("kl", "gold")]
        theirs = other.answers["policy"]
        return lead_at_equal_kl(*curve, theirs["kl"], theirs["gold"], RESAMPLES, seed=1)


Figure = tuple[float, Sequence[float] | None] | None
"""A value with its interval over prompts; None where it is unknown."""


def figures(found: Round, single: Round) -> Iterator[Figure]:
    """The columns of the table for one seed: pairs, agreement with the rubric on the policy's own answers, gold, KL,
    and the gold over the single round's at its KL."""
    evaluation = found.metrics("evaluate")
    own, policy = evaluation["reward_model"]["policy"], evaluation["models"]["policy"]
    yield found.metrics("preferences")["pairs"], None
    yield None if own["agreement"] is None else (own["agreement"], interval(own, "agreement"))
    yield policy["gold"], interval(policy, "gold")
    yield policy["kl"], interval(policy, "kl")
    lead = None if found.folder == single.folder else found.lead(single)
    yield None if lead is None else (lead.mean, lead.interval)


def table(folder: Path, arms: Sequence[str], seeds: Sequence[int], count: int) -> str:
    """Markdown."""
    columns = ("pairs", "agreement on its own answers", "gold", "KL to SFT", "gold less single, at its KL")
    lines = [f"| reference | round | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for arm in arms:
        for number in range(1, (1 if arm == SINGLE else count) + 1):
            rows = [
                list(figures(Round(place_of(folder, arm, seed, number)), Round(place_of(folder, SINGLE, seed, 1))))
                for seed in seeds
            ]
            cells = [
                cell(column, digits) for column, digits in zip(zip(*rows, strict=True), (0, 2, 2, 2, 2), strict=True)
            ]
            lines.append(f"| {arm} | {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(values: Sequence[Figure], digits: int) -> str:
    """The mean over the seeds with its interval, and the value of each seed."""
    known = [value for value in values if value is not None]
    found = summarise([value for value, _ in known], [standard_error(interval) for _, interval in known])
    if found is None:
        return "–"
    ends = "" if found.low is None or not digits else f" ({found.low:.{digits}f} – {found.high:.{digits}f})"
    each = ", ".join("–" if value is None else f"{value[0]:.{digits}f}" for value in values)
    return f"{found.mean:.{digits}f}{ends} [{each}]".replace("-", "−")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
