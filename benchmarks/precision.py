"""GFLOP/s of SFT, reward model and PPO at SmolLM2-135M's size (random weights) on the CPU, in float32 and bfloat16,
beside the peak of matrix products.

    python -m benchmarks.precision [--rows sft reward ppo ppo-lora] [--rounds 3] [--project .]

Each measurement is a process of its own; float32 and bfloat16 alternate. The first step is a warm-up, in which torch
counts the floating-point operations of all matrix products; attention is not counted. The table is Markdown. Run it on
an idle machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.setups import PAIRS, PROMPTS, comparisons, ppo_settings, ppo_trainer, write_random_models
from rlhf_core.config.precision import Precision
from rlhf_core.config.reward import RewardConfig
from rlhf_core.config.sft import SFTConfig
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.determinism import make_deterministic
from rlhf_core.models.hf import load_causal_lm, load_scalar_model
from rlhf_core.reward import train_reward_model
from rlhf_core.sft import Demonstration, fine_tune
from rlhf_core.training.run import Run

ROOT = Path(__file__).resolve().parents[1]
STEPS = 3
"""Of each measurement, with the warm-up."""
LORA = {"lora": {"rank": 16}, "critic": {"kind": "shared", "warmup_steps": 0}}
PPO = {"ppo": {}, "ppo-lora": LORA}
TITLES = {
    "peak": "a product of 2,048 × 2,048 matrices",
    "sft": "SFT, 32 answers a step",
    "reward": "reward model, 4 prompts a step with all their answers",
    "ppo": "PPO, 16 answers of 32 tokens, one epoch, a critic of its own",
    "ppo-lora": "PPO, the same with LoRA on a shared body",
}


def main() -> None:
    """Measure the rows in turn, and print the table."""
    options = arguments().parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure, options)))
        return
    models = write_random_models(options.scratch / "smollm2-135m", options.project / "models/sft")
    found: dict[str, list[list[dict[str, float]]]] = {name: [] for name in options.rows}
    for _ in range(options.rounds):
        for name, rounds in found.items():
            rounds.append([run(name, precision, models, options) for precision in ("float32", "bfloat16")])
    print(table(found))


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--project", type=Path, default=ROOT, help="a folder with the demo's models and data")
    parser.add_argument("--scratch", type=Path, default=ROOT / "work/trl", help="for the random models")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    return parser


def run(name: str, precision: str, models: Path, options: argparse.Namespace) -> dict[str, float]:
    """A measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.precision", "--measure", name, precision, str(models.resolve())]
    command += ["--threads", str(options.threads), "--project", str(options.project.resolve())]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}, {precision}: {result}", file=sys.stderr, flush=True)
    return result


def table(found: dict[str, list[list[dict[str, float]]]]) -> str:
    """Markdown: medians over the rounds, the lowest and highest in brackets, and the ratio of each round."""
    lines = [
        "| | float32: GFLOP/s | bfloat16: GFLOP/s | seconds of a step | times as fast, round by round |",
        "|---|---|---|---|---|",
    ]
    for name, rounds in found.items():
        cells = []
        for place in (0, 1):
            rates = [sides[place]["operations"] / sides[place]["seconds"] / 1e9 for sides in rounds]
            cells.append(f"{statistics.median(rates):.0f} ({min(rates):.0f} – {max(rates):.0f})")
        cells.append(
            ", ".join(f"{statistics.median(sides[place]['seconds'] for sides in rounds):.3g}" for place in (0, 1))
        )
        cells.append(", ".join(f"{exact['seconds'] / rounded['seconds']:.2f}" for exact, rounded in rounds))
        lines.append(f"| {TITLES[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(name: str, precision: Precision, folder: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step (median without the first), and the operations of its matrix products."""
    make_deterministic(1, options.threads)
    models, project = Path(folder), options.project
    if name == "peak":
        one = torch.randn(2048, 2048, dtype=getattr(torch, precision))
        seconds = timed(lambda: torch.mm(one, one), 10)
        return {"operations": 2 * 2048**3, "seconds": statistics.median(seconds[1:])}
    counter = FlopCounterMode(display=False)
    if name in PPO:
        settings = ppo_settings(16, 16, 1, 32, **PPO[name])
        trainer = ppo_trainer(models, project / PROMPTS, settings, precision=precision)
        with counter:
            trainer.step()
        seconds = timed(trainer.step, STEPS - 1)
        return {"operations": counter.get_total_flops(), "seconds": statistics.median(seconds)}

    ends: list[float] = []

    def report(*_: object) -> None:
        if not ends:
            counter.__exit__(None, None, None)
        ends.append(time.perf_counter())

    pad_id = int(load_tokenizer(models / "sft").pad_token_id)
    with tempfile.TemporaryDirectory() as state:
        run_ = Run(Path(state), 1, report, 10**9, log=lambda _: None, precision=precision)
        settings = {"learning_rate": 1e-6, "warmup_steps": 0, "max_tokens": 1024}
        if name == "reward":
            pairs = comparisons(models, project / PAIRS, 4) * STEPS
            scores = load_scalar_model(models / "reward")
            counter.__enter__()
            train_reward_model(scores, pairs, RewardConfig.model_validate(settings | {"batch_size": 4}), pad_id, run_)
        else:
            answers = [(c.prompt, c.responses[0]) for c in comparisons(models, project / PAIRS, 32)]
            rows = [Demonstration(*answer) for answer in answers] * STEPS
            config = SFTConfig.model_validate(settings | {"batch_size": 32, "micro_batch_size": 32})
            policy = load_causal_lm(models / "sft")
            counter.__enter__()
            fine_tune(policy, rows, rows[:1], config, pad_id, run_)
    return {
        "operations": counter.get_total_flops(),
        "seconds": statistics.median(b - a for a, b in pairwise(ends[:STEPS])),
    }


def timed(function: Callable[[], object], times: int) -> list[float]:
    """The seconds of each call."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return found


if __name__ == "__main__":
    main()
