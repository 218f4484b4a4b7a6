"""Planned against measured peak memory of SFT and PPO on the CPU, for models of several sizes. Each real run is a
process of its own; its peak is the highest resident memory (VmHWM) less what was resident after a run of a tiny model,
which loads libraries and kernels. Freed memory is returned to the system at once; with --keep it is kept, as in a run.

    python benchmarks/plan_memory.py [--sizes 5 20 50] [--keep] [--json]
"""

import argparse
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.sft import SFTConfig
from rlhf_core.models.sampling import sample
from rlhf_core.planning.memory import Lengths, ppo_phases, sft_phases
from rlhf_core.planning.shapes import Shapes, planned_for, rows_of
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.optimizers import build_optimizers
from rlhf_core.ppo.plan import StepPlan
from rlhf_core.ppo.rollout import Credit, Rollout
from rlhf_core.ppo.update import Updater
from rlhf_core.sft import Demonstration, fine_tune
from rlhf_core.training.memory import Halving
from rlhf_core.training.processes import Processes
from rlhf_core.training.run import Run

SHAPES = {1: (64, 2, 512), 5: (256, 4, 4096), 20: (512, 5, 8192), 50: (768, 6, 8192)}
"""Hidden size, layers and vocabulary for about so many million parameters."""
LENGTHS = Lengths(32, 32)
SFT: dict[str, Any] = {
    "learning_rate": 1e-3, "epochs": 1, "batch_size": 16, "micro_batch_size": 8, "warmup_steps": 0,
    "weight_decay": 0.0, "max_tokens": LENGTHS.whole, "evaluate_every": 100, "patience": 0,
}  # fmt: skip
PPO: dict[str, Any] = {
    "steps": 2, "batch_size": 16, "minibatches": 1, "micro_batch_size": 8, "ppo_epochs": 2, "learning_rate": 1e-4,
    "clip_ratio": 0.2, "vf_coef": 0.5, "entropy_coef": 0.0, "gamma": 1.0, "lam": 0.95, "temperature": 1.0,
    "max_new_tokens": LENGTHS.response, "whiten_advantages": True, "check_ratio": False, "sample_every": 10,
    "kl": {"coef": 0.1, "controller": "fixed", "target": 1.0, "horizon": 100},
    "critic": {"init": "sft", "learning_rate": 1e-4, "value_clip": 0.2, "clip_value": True},
    "optimizer": {"betas": [0.9, 0.95], "eps": 1e-5, "warmup_steps": 0, "decay": "none", "max_grad_norm": 1.0},
    "score": {"normalise": False, "clip": 5.0, "missing_eos_penalty": 0.0},
}  # fmt: skip
PHASES = ("sft", "ppo update", "ppo sampling")


def config_of(size: int) -> LlamaConfig:
    """The model of a size in million parameters."""
    hidden, layers, vocabulary = SHAPES[size]
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, max_position_embeddings=128, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip


def planned(size: int) -> dict[str, int]:
    """Bytes at the peak of each phase, by the plan."""
    shapes = Shapes(config_of(size))
    with planned_for(accelerator=False):
        sft = sft_phases(shapes, SFTConfig.model_validate(SFT), LENGTHS)
        ppo = {phase.name: phase for phase in ppo_phases(shapes, PPOConfig.model_validate(PPO), LENGTHS, 0)}
    found = (max(phase.peak for phase in sft), ppo["update"].peak, ppo["sampling"].peak)
    return dict(zip(PHASES, found, strict=True))


def run_sft(size: int) -> None:
    """Two optimizer steps of two micro-batches each, with validation."""
    config, torch_config = SFTConfig.model_validate(SFT), config_of(size)
    model = AutoModelForCausalLM.from_config(torch_config).eval()
    prompts, responses = (rows_of(32, n, torch_config.vocab_size) for n in (LENGTHS.prompt, LENGTHS.response))
    rows = [Demonstration(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    with TemporaryDirectory() as folder:
        fine_tune(model, rows, rows[:8], config, 0, Run(Path(folder), 0, lambda *_: None, log=lambda _: None))


def updater_of(size: int) -> tuple[Updater, Rollout, Credit]:
    """PPO's update with real models, and a rollout of one minibatch."""
    config, torch_config = PPOConfig.model_validate(PPO), config_of(size)
    policy, reference = (AutoModelForCausalLM.from_config(torch_config) for _ in range(2))
    torch_config.num_labels = 1
    critic: PreTrainedModel = AutoModelForSequenceClassification.from_config(torch_config).eval()
    models = ActorCritic(config, policy, reference, critic)
    optimizers = build_optimizers(models.trained(), config)
    updater = Updater(models, optimizers, config, 0, 0, Processes(), Halving("the update", "", print))
    prompts, responses = (rows_of(16, n, torch_config.vocab_size) for n in (LENGTHS.prompt, LENGTHS.response))
    mask = torch.ones(16, LENGTHS.response)
    zeros = [torch.zeros_like(mask) for _ in range(10)]
    rollout = Rollout([[]] * 16, prompts, responses, [""] * 16, mask[:, 0].bool(), mask, *zeros[:5])
    return updater, rollout, Credit(*zeros[5:], scale=1.0)


def run_update(size: int) -> None:
    """Two optimizer steps of two micro-batches each."""
    updater, rollout, credit = updater_of(size)
    plan = StepPlan(0, True, True, epochs=2, minibatches=1, kl_coef=0.1, step_price=1.0)
    updater.read(rollout, plan)
    updater.run(rollout, credit, plan)


def run_sampling(size: int) -> None:
    """Sixteen responses side by side, with the optimizers' state of an update before."""
    updater, rollout, _ = updater_of(size)
    for optimizer in updater.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parts = {name: torch.zeros_like(parameter).add_(0) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = parts
    sample(
        updater.models.policy, rollout.prompt_ids, [(0, row) for row in range(16)], temperature=1.0, pad_id=0,
        max_new_tokens=LENGTHS.response, stop_ids=frozenset(), batch_size=16,
    )  # fmt: skip


RUNS: dict[str, Callable[[int], None]] = dict(zip(PHASES, (run_sft, run_update, run_sampling), strict=True))


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


def return_freed_memory() -> None:
    """Let glibc return what is freed: tensors of 64 KiB or more are maps of their own."""
    libc = ctypes.CDLL(None)
    if not all(libc.mallopt(name, 2**16) for name in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)):
        raise RuntimeError("mallopt failed: this measurement needs glibc")


def grown(phase: str, size: int, keep: bool) -> int:
    """The peak of resident memory in a real run, less what was resident before it."""
    torch.set_num_threads(1)
    if not keep:
        return_freed_memory()
    RUNS[phase](1)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts again
    RUNS[phase](size)
    return resident("VmHWM") - before


def measured(phase: str, size: int, keep: bool = False) -> int:
    """`grown` in a process of its own."""
    command = [sys.executable, __file__, "--child", phase, "--sizes", str(size), *["--keep"] * keep]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def compare(sizes: list[int], keep: bool = False) -> list[dict[str, Any]]:
    """Planned and measured bytes of each size and phase."""
    rows = []
    for size in sizes:
        plan = planned(size)
        for phase in PHASES:
            real = measured(phase, size, keep)
            row = {"million": size, "phase": phase, "planned": plan[phase], "measured": real}
            rows.append(row | {"ratio": plan[phase] / real})
    return rows


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[5, 20, 50], choices=sorted(SHAPES))
    parser.add_argument("--child", choices=PHASES)
    parser.add_argument("--keep", action="store_true", help="keep freed memory, as a run does")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        print(grown(arguments.child, arguments.sizes[0], arguments.keep))
        return
    rows = compare(arguments.sizes, arguments.keep)
    if arguments.json:
        print(json.dumps(rows))
        return
    print("| million parameters | phase | planned, MB | measured, MB | planned / measured |\n|---|---|---|---|---|")
    for row in rows:
        sizes = f"{row['planned'] / 1e6:.0f} | {row['measured'] / 1e6:.0f}"
        print(f"| {row['million']} | {row['phase']} | {sizes} | {row['ratio']:.2f} |")


if __name__ == "__main__":
    main()
