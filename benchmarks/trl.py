"""Leash and TRL on the same work, on the CPU, in float32: PPO against the last TRL that has it, and reward model, RLOO
and DPO against a newer one, with the models of a finished demo and of SmolLM2-135M's size.

    python -m benchmarks.trl [--rows ppo dpo …] [--rounds 3] [--project .]

Each measurement is a process of its own; within a round Leash and TRL alternate, row by row. The first step of a
process is a warm-up. TRL is installed from PyPI into `--scratch`, beside the torch and transformers of this
environment. The table is Markdown, printed after each round and written to `--scratch`/table.md. Run it on an idle
machine.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.setups import PAIRS, PROMPTS, comparisons, pair_rows, ppo_settings, ppo_trainer, write_random_models
from rlhf_core.config.dpo import DPOConfig
from rlhf_core.config.reward import RewardConfig
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.determinism import make_deterministic
from rlhf_core.dpo import dpo_objective, reference_logprobs, train_on_pairs
from rlhf_core.models.hf import load_causal_lm, load_scalar_model
from rlhf_core.reward import train_reward_model
from rlhf_core.training.run import Run

ROOT = Path(__file__).resolve().parents[1]
WITH_PPO, NEWER = "1.12.0", "1.16.0"
"""Versions of TRL: the last one with PPO, and that of the other rows."""


@dataclass(frozen=True)
class Row:
    """One comparison. A step is a rollout with its optimiser steps (PPO, RLOO), or one optimiser step on pairs."""

    title: str
    method: str
    """`ppo`, `rloo`, `reward` or `dpo`."""
    large: bool = False
    """SmolLM2-135M's size in place of the demo's."""
    steps: int = 4
    """With the warm-up."""
    batch: int = 128
    """Answers of a step; with pairs: prompts of a step, each with all its pairs, and TRL gets as many pairs."""
    micro_batch: int = 64
    """Answers of a pass; pairs of a pass in TRL."""
    epochs: int = 4
    longest: int = 48
    changes: dict[str, Any] = field(default_factory=dict)
    """Of Leash's block `ppo`."""

    @property
    def version(self) -> str:
        """Of TRL."""
        return WITH_PPO if self.method == "ppo" else NEWER


RLOO = {"advantage": "rloo", "samples_per_prompt": 4, "whiten_advantages": False, "critic": {}}
SHARED = {"critic": {"kind": "shared", "warmup_steps": 0}}
ROWS = {
    "ppo": Row("PPO", "ppo"),
    "ppo-shared": Row("PPO, shared critic; TRL's has its own", "ppo", changes=SHARED),
    "rloo": Row("RLOO, 4 answers to a prompt", "rloo", epochs=1, changes=RLOO),
    "reward": Row("reward model", "reward", steps=8, batch=16, micro_batch=32),
    "dpo": Row("DPO", "dpo", steps=8, batch=16, micro_batch=32),
    "ppo-135m": Row("PPO", "ppo", True, 3, 16, 16, 1, 32),
    "rloo-135m": Row("RLOO, 4 answers to a prompt", "rloo", True, 3, 16, 16, 1, 32, RLOO),
    "reward-135m": Row("reward model", "reward", True, 3, 2, 8),
    "dpo-135m": Row("DPO", "dpo", True, 3, 2, 8),
}


def main() -> None:
    """Measure the rows, and print the table."""
    options = arguments().parse_args()
    if options.side:
        print(json.dumps(measure(json.load(sys.stdin))))
        return
    options.scratch = options.scratch.resolve()
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {name: [] for name in options.rows}
    pythons = {version: environment(options.scratch, version) for version in {ROWS[n].version for n in options.rows}}
    for _ in range(options.rounds):
        for name in options.rows:
            work, theirs = work_of(ROWS[name], options)
            ours = run([sys.executable, "-m", "benchmarks.trl", "--side"], work)
            found[name].append((ours, run([pythons[ROWS[name].version], "-m", "benchmarks.trl_side"], theirs)))
        (options.scratch / "table.md").write_text(text := table(found), encoding="utf-8")
        print(text, flush=True)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each measurement, the warm-up included; default: that of the row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--project", type=Path, default=ROOT, help="a folder with the demo's models and data")
    parser.add_argument("--scratch", type=Path, default=ROOT / "work/trl", help="for environments and random models")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    return parser


def environment(scratch: Path, version: str) -> str:
    """The Python of an environment with this version of TRL; everything that is installed here is visible in it."""
    folder = scratch / f"trl-{version}"
    python = folder / "bin/python"
    if not (folder / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        site = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        Path(site.strip(), "leash.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "-q", f"trl=={version}"], check=True)
        (folder / "done").touch()
    return str(python)


def work_of(row: Row, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Leash and TRL receive on standard input."""
    models = options.project.resolve() / "models"
    if row.large:
        models = write_random_models(options.scratch / "smollm2-135m", models / "sft")
    work = {
        "models": str(models),
        "prompts": str(options.project.resolve() / PROMPTS),
        "pairs": str(options.project.resolve() / PAIRS),
        "threads": options.threads,
        "method": row.method,
        "steps": options.steps or row.steps,
        "batch": row.batch,
        "micro_batch": row.micro_batch,
        "epochs": row.epochs,
        "longest": row.longest,
        "changes": row.changes,
        "samples_per_prompt": row.changes.get("samples_per_prompt", 1),
    }
    if row.method in ("ppo", "rloo"):
        return work, work
    pairs = pair_rows(Path(work["pairs"]), row.batch * work["steps"])
    rows = [
        {"prompt": pair["prompt"]}
        | {side: [{"role": "assistant", "content": pair[side]}] for side in ("chosen", "rejected")}
        for pair in pairs
    ]
    passes = max(1, round(len(pairs) / work["steps"] / row.micro_batch))
    return work, work | {"pairs": rows, "batch": passes * row.micro_batch}


def run(command: Sequence[str], work: dict[str, Any]) -> dict[str, Any]:
    """Run a side in a process of its own: answers or pairs per second (median over the steps after the first), and the
    peak of memory in MiB."""
    done = subprocess.run(
        command, input=json.dumps(work), stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT, env=os.environ
    )
    result = json.loads(done.stdout.splitlines()[-1])
    items = result.get("items") or [work["batch"]] * len(result["seconds"])
    rates = [count / seconds for count, seconds in zip(items[1:], result["seconds"][1:], strict=True)]
    found = {"rate": statistics.median(rates), "peak_mib": result["peak_mib"]}
    print(f"{work['method']}: {found['rate']:.3g} a second, {found['peak_mib']:.0f} MiB", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]) -> str:
    """Markdown: medians over the rounds, the lowest and highest in brackets, and the ratio of each round."""
    lines = [
        "| models | | Leash, per second | TRL, per second | times TRL's, round by round | memory, MiB: Leash, TRL |",
        "|---|---|---|---|---|---|",
    ]
    for name, rounds in found.items():
        if not rounds:
            continue
        row, items = ROWS[name], "answers" if ROWS[name].method in ("ppo", "rloo") else "pairs"
        rates = [[side["rate"] for side in sides] for sides in zip(*rounds, strict=True)]
        cells = [f"{items}: {statistics.median(r):.3g} ({min(r):.3g} – {max(r):.3g})" for r in rates]
        ratios = ", ".join(f"{ours / theirs:.2f}" for ours, theirs in zip(*rates, strict=True))
        memory = ", ".join(f"{max(side['peak_mib'] for side in sides):.0f}" for sides in zip(*rounds, strict=True))
        size = "SmolLM2-135M's size" if row.large else "demo"
        lines.append(f"| {size} | {row.title} (TRL {row.version}) | {' | '.join(cells)} | {ratios} | {memory} |")
    return "\n".join(lines) + "\n"


def measure(work: dict[str, Any]) -> dict[str, Any]:
    """Leash's side, in this process: seconds of each step, pairs of each step, and the peak of memory in MiB."""
    make_deterministic(1, work["threads"])
    seconds: list[float] = []
    items: list[int] | None = None
    if work["method"] in ("ppo", "rloo"):
        settings = ppo_settings(work["batch"], work["micro_batch"], work["epochs"], work["longest"], **work["changes"])
        trainer = ppo_trainer(Path(work["models"]), Path(work["prompts"]), settings)
        for _ in range(work["steps"]):
            start = time.perf_counter()
            trainer.step()
            seconds.append(time.perf_counter() - start)
            print({name: round(part, 2) for name, part in trainer.seconds.items()}, file=sys.stderr)
    else:
        seconds, items = train_pairs(work)
    return {
        "seconds": seconds,
        "items": items,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def train_pairs(work: dict[str, Any]) -> tuple[list[float], list[int]]:
    """Train a reward model, or with DPO, on one batch of prompts a step. Each step of DPO contains its share of the
    pass of the reference, which Leash makes before the training."""
    models, batch = Path(work["models"]), work["batch"]
    data = comparisons(models, Path(work["pairs"]), batch * work["steps"])
    settings = {"batch_size": batch, "learning_rate": 1e-6, "warmup_steps": 0}
    pad_id = int(load_tokenizer(models / "sft").pad_token_id)
    ends, before = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), 1, lambda *_: ends.append(time.perf_counter()), 10**9, log=lambda _: None)
        if work["method"] == "reward":
            scores = load_scalar_model(models / "reward")
            start = time.perf_counter()
            train_reward_model(scores, data, RewardConfig.model_validate(settings), pad_id, run)
        else:
            policy, config = load_causal_lm(models / "sft"), DPOConfig.model_validate(settings | {"enabled": True})
            reference_logprobs(policy, data[:2], pad_id)
            start = time.perf_counter()
            references = reference_logprobs(policy, data, pad_id)
            before = time.perf_counter() - start
            start = time.perf_counter()
            train_on_pairs(policy, data, references, config, dpo_objective(config), pad_id, run, "dpo")
    seconds = [end - begin + before / len(ends) for begin, end in zip([start, *ends], ends, strict=False)]
    order = [len(comparison.pairs) for comparison in data]
    return seconds, [round(sum(order) / len(seconds))] * len(seconds)


if __name__ == "__main__":
    main()
