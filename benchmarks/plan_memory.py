"""Planned against measured peak memory of training and sampling on the CPU, for models of several sizes. Each real run
is a process of its own; its peak is the highest resident memory (VmHWM) less what was resident after a run of a tiny
model, which loads libraries and kernels. Freed memory is returned to the system at once; with --keep it is kept, as in
a run.

    python benchmarks/plan_memory.py [--sizes 1 5 20 135] [--phases "ppo update"] [--keep]

135 has the shape of SmolLM2-135M and needs 8 GB.
"""

import argparse
import ctypes
from collections.abc import Callable, Collection, Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel

from rlhf_core.config.dpo import DPOConfig
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.config.reward import RewardConfig
from rlhf_core.config.sft import SFTConfig
from rlhf_core.dpo import dpo_objective, train_on_pairs
from rlhf_core.models.precision import body_precision, frozen_dtype
from rlhf_core.models.sampling import sample
from rlhf_core.planning import Lengths, Model, Phase, pair_phases, ppo_phases, reward_phases, sft_phases
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.kl import FixedKLController
from rlhf_core.ppo.optimizers import build_optimizers
from rlhf_core.ppo.rollout import Rollout, Scores
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.reward import Comparison, train_reward_model
from rlhf_core.sft import Demonstration, fine_tune
from rlhf_core.training.processes import Processes
from rlhf_core.training.run import Run

SHAPES = {
    0: (16, 64, 1, 8, 8, 64),
    1: (128, 512, 4, 8, 8, 1024),
    5: (256, 1024, 4, 8, 8, 4096),
    20: (512, 2048, 5, 8, 8, 8192),
    135: (576, 1536, 30, 9, 3, 49152),
}
"""Hidden and intermediate size, layers, heads, heads of keys and vocabulary for about so many million parameters; 0:
the model that is run before."""
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
    "critic": {"init": "sft", "learning_rate": 1e-4, "value_clip": 0.2, "clip_value": True, "warmup_steps": 0},
    "optimizer": {"betas": [0.9, 0.95], "eps": 1e-5, "warmup_steps": 0, "decay": "none", "max_grad_norm": 1.0},
    "score": {"normalise": False, "clip": 5.0, "missing_eos_penalty": 0.0},
}  # fmt: skip
PAIRS: dict[str, Any] = {
    "learning_rate": 1e-3, "epochs": 1, "batch_size": 8, "warmup_steps": 0, "weight_decay": 0.0,
    "max_tokens": LENGTHS.whole,
}  # fmt: skip
ANSWERS = 4
"""Of each prompt that the reward model and DPO learn from."""
CHANGES: dict[str, dict[str, Any]] = {
    "sft": {},
    "sft, LoRA": {"lora": {"rank": 8}},
    "sft, recomputed": {"gradient_checkpointing": True},
}
"""Trainings of SFT that are compared; with bfloat16 also the first."""
UPDATES: dict[str, tuple[dict[str, Any], Precision]] = {
    "ppo update": ({}, "float32"),
    "ppo update, bfloat16": ({}, "bfloat16"),
    "ppo update, LoRA": ({"lora": {"rank": 8}, "critic": {"kind": "shared"}}, "float32"),
    "ppo update, LoRA, bfloat16": ({"lora": {"rank": 8}, "critic": {"kind": "shared"}}, "bfloat16"),
}
"""Updates of PPO: settings and precision. The first have a critic of its own."""


def config_of(size: int) -> LlamaConfig:
    """The model of a size in million parameters."""
    hidden, intermediate, layers, heads, key_heads, vocabulary = SHAPES[size]
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=128, tie_word_embeddings=True,
        pad_token_id=0,
    )  # fmt: skip


def planned(size: int) -> dict[str, int]:
    """Bytes at the peak of each phase, by the plan."""
    model, half = Model.of(config_of(size)), Model.of(config_of(size), precision="bfloat16")
    found = {
        name: peak_of(sft_phases(model, SFTConfig.model_validate(SFT | change), LENGTHS))
        for name, change in CHANGES.items()
    }
    found["sft, bfloat16"] = peak_of(sft_phases(half, SFTConfig.model_validate(SFT), LENGTHS))
    found["reward model"] = peak_of(reward_phases(model, RewardConfig.model_validate(PAIRS), LENGTHS, ANSWERS))
    dpo = DPOConfig.model_validate(PAIRS | {"enabled": True})
    found["dpo"] = peak_of(pair_phases(model, dpo, LENGTHS, ANSWERS)[1:])
    for name, (change, precision) in UPDATES.items():
        phases = ppo_phases(half if precision == "bfloat16" else model, ppo_config(change), LENGTHS, 0)
        found[name] = next(phase.peak for phase in phases if phase.name == "update")
    found["ppo sampling"] = next(p.peak for p in ppo_phases(model, ppo_config({}), LENGTHS, 0) if p.name == "sampling")
    return found


def ppo_config(change: dict[str, Any]) -> PPOConfig:
    """The settings of PPO with some changed."""
    return PPOConfig.model_validate(PPO | change | {"critic": PPO["critic"] | change.get("critic", {})})


def peak_of(phases: list[Phase]) -> int:
    """The highest peak of the phases, in bytes."""
    return max(phase.peak for phase in phases)


def rows_of(rows: int, length: int, vocabulary: int) -> list[list[int]]:
    """Sequences of token ids [rows][length] without a common prefix and without token 0, the padding: transformers sets
    its embedding to 0, and through 30 random layers the gradient of a zero vector overflows."""
    return [[1 + (row + place) % (vocabulary - 1) for place in range(length)] for row in range(rows)]


def run_sft(size: int, change: dict[str, Any], precision: Precision = "float32") -> None:
    """Two optimizer steps of two micro-batches each, with validation."""
    config, torch_config = SFTConfig.model_validate(SFT | change), config_of(size)
    model = AutoModelForCausalLM.from_config(torch_config).eval()
    prompts, responses = (rows_of(32, n, torch_config.vocab_size) for n in (LENGTHS.prompt, LENGTHS.response))
    rows = [Demonstration(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    with TemporaryDirectory() as folder:
        run = Run(Path(folder), 0, lambda *_: None, log=lambda _: None, precision=precision)
        fine_tune(model, rows, rows[:8], config, 0, run)


def run_pairs(size: int, is_policy: bool) -> None:
    """Two optimizer steps of the reward model or of DPO; every two answers to a prompt are a pair."""
    torch_config = config_of(size)
    torch_config.num_labels = 1
    prompts = rows_of(16, LENGTHS.prompt, torch_config.vocab_size)
    answers = rows_of(16 * ANSWERS, LENGTHS.response, torch_config.vocab_size)
    pairs = [(better, worse) for better in range(ANSWERS) for worse in range(better)]
    rows = [Comparison(p, answers[i * ANSWERS : (i + 1) * ANSWERS], pairs) for i, p in enumerate(prompts)]
    with TemporaryDirectory() as folder:
        run = Run(Path(folder), 0, lambda *_: None, log=lambda _: None)
        if is_policy:
            policy, config = AutoModelForCausalLM.from_config(torch_config).eval(), PAIRS | {"enabled": True}
            dpo, references = DPOConfig.model_validate(config), [[-1.0] * ANSWERS] * len(rows)
            train_on_pairs(policy, rows, references, dpo, dpo_objective(dpo), 0, run, "dpo")
        else:
            model = AutoModelForSequenceClassification.from_config(torch_config).eval()
            train_reward_model(model, rows, RewardConfig.model_validate(PAIRS), 0, run)


def trainer_of(size: int, change: dict[str, Any], precision: Precision) -> tuple[PPOTrainer, Rollout]:
    """PPO with real models, and a rollout of one minibatch."""
    config, torch_config = ppo_config(change), config_of(size)
    dtype = frozen_dtype(body_precision(precision, config.lora))
    policy, reference = (AutoModelForCausalLM.from_config(torch_config, dtype=dtype) for _ in range(2))
    critic: PreTrainedModel | None = None
    if config.needs_critic_model:
        torch_config.num_labels = 1
        critic = AutoModelForSequenceClassification.from_config(torch_config).eval()
    trainer = object.__new__(PPOTrainer)  # without a tokenizer and prompts
    trainer.config, trainer.seed, trainer.pad_id, trainer.steps_done = config, 0, 0, 0
    trainer.models = ActorCritic(config, policy, reference if config.lora is None else None, critic, 0, precision)
    trainer.processes, trainer.text = Processes(), None
    trainer.optimizers, trainer.schedulers = build_optimizers(trainer.models.trained(), config), {}
    trainer.seconds, trainer.controller = {}, FixedKLController(0.1)
    trainer.scoring = lambda rollout, _: Scores(rollout.mask[:, 0], rollout.mask[:, 0], None)  # type: ignore[assignment]
    prompts, responses = (rows_of(16, n, torch_config.vocab_size) for n in (LENGTHS.prompt, LENGTHS.response))
    mask = torch.ones(16, LENGTHS.response)
    rollout = Rollout(
        [[]] * 16, prompts, responses, [""] * 16, mask[:, 0].bool(), mask, *(torch.zeros_like(mask) for _ in range(6))
    )
    return trainer, rollout


def run_update(size: int, change: dict[str, Any], precision: Precision) -> None:
    """Two optimizer steps of two micro-batches each."""
    trainer, rollout = trainer_of(size, change, precision)
    batch = rollout.batch(range(8), 0)
    trainer.models.compare(batch, 1.0)
    trainer.step(rollout)


def run_sampling(size: int) -> None:
    """Sixteen responses side by side, with the optimizers' state of an update before."""
    updater, rollout = trainer_of(size, {}, "float32")
    for optimizer in updater.optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parts = {name: torch.zeros_like(parameter).add_(0) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = parts
    sample(
        updater.models.policy, rollout.prompt_ids, [(0, row) for row in range(16)], temperature=1.0, pad_id=0,
        max_new_tokens=LENGTHS.response, stop_ids=frozenset(), batch_size=16,
    )  # fmt: skip


RUNS: dict[str, Callable[[int], None]] = {
    **{name: partial(run_sft, change=change) for name, change in CHANGES.items()},
    "sft, bfloat16": partial(run_sft, change={}, precision="bfloat16"),
    "reward model": partial(run_pairs, is_policy=False),
    "dpo": partial(run_pairs, is_policy=True),
    **{name: partial(run_update, change=change, precision=used) for name, (change, used) in UPDATES.items()},
    "ppo sampling": run_sampling,
}


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
    RUNS[phase](0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts again
    RUNS[phase](size)
    return resident("VmHWM") - before


def compare(sizes: list[int], keep: bool = False, phases: Collection[str] = RUNS.keys()) -> Iterator[dict[str, Any]]:
    """Planned and measured bytes of each size and phase."""
    for size in sizes:
        for phase, plan in planned(size).items():
            if phase not in phases:
                continue
            with get_context("fork").Pool(1) as process:  # libraries are imported once
                real = process.apply(grown, (phase, size, keep))
            row = {"million": size, "phase": phase, "planned": plan, "measured": real}
            yield row | {"ratio": plan / real}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 5, 20], choices=sorted(SHAPES))
    parser.add_argument("--phases", nargs="+", default=list(RUNS), choices=RUNS, metavar="PHASE", help=", ".join(RUNS))
    parser.add_argument("--keep", action="store_true", help="keep freed memory, as a run does")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| million parameters | phase | planned, MB | measured, MB | planned / measured |\n|---|---|---|---|---|")
    for row in compare(arguments.sizes, arguments.keep, arguments.phases):
        sizes = f"{row['planned'] / 1e6:.1f} | {row['measured'] / 1e6:.1f}"
        print(f"| {row['million']} | {row['phase']} | {sizes} | {row['ratio']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
