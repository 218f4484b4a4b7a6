"""The work of `benchmarks.trl` in TRL: a row of its table, in an environment of its own. Imports nothing of Leash. The
last line printed is JSON."""

import json
import os
import resource
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

RATE = 1e-6


class Clock(TrainerCallback):
    """When each optimiser step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())


def common(work: dict[str, Any], micro_batch: int, **more: Any) -> dict[str, Any]:
    """Arguments of every trainer: float32 on the CPU, activations kept, the batch of the work."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="trl-"),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": work["batch"] // micro_batch,
        "learning_rate": RATE,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
    } | more


def prompts_of(work: dict[str, Any]) -> list[Any]:
    """The prompts of PPO and RLOO, as conversations."""
    return [json.loads(line)["prompt"] for line in Path(work["prompts"]).read_text("utf-8").strip().split("\n")]


def ppo(work: dict[str, Any], policy: Any, reward: Any, tokenizer: Any, clock: Clock) -> Any:
    """TRL's PPO with a critic of its own."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    rows = [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        for prompt in prompts_of(work)
    ]
    settings = PPOConfig(
        **common(work, work["micro_batch"]),
        num_mini_batches=1,
        local_rollout_forward_batch_size=work["micro_batch"],
        total_episodes=work["steps"] * work["batch"],
        num_ppo_epochs=work["epochs"],
        response_length=work["longest"],
        temperature=1.0,
        kl_coef=0.05,
        missing_eos_penalty=1.0,
        stop_token="eos",
        num_sample_generations=0,
    )
    return PPOTrainer(
        args=settings,
        processing_class=tokenizer,
        model=policy(),
        ref_model=policy(),
        reward_model=reward(),
        value_model=reward(),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        callbacks=[clock],
    )


def rloo(work: dict[str, Any], policy: Any, reward: Any, tokenizer: Any, clock: Clock) -> Any:
    """TRL's RLOO: one optimiser step on each rollout."""
    from trl import RLOOConfig, RLOOTrainer

    settings = RLOOConfig(
        **common(work, work["micro_batch"], max_steps=work["steps"]),
        num_generations=work["samples_per_prompt"],
        max_completion_length=work["longest"],
        temperature=1.0,
        beta=0.05,
    )
    return RLOOTrainer(
        model=policy(),
        reward_funcs=reward(),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts_of(work)}),
        processing_class=tokenizer,
        reward_processing_classes=tokenizer,
        callbacks=[clock],
    )


def reward_model(work: dict[str, Any], policy: Any, reward: Any, tokenizer: Any, clock: Clock) -> Any:
    """TRL's reward model: a row for each pair."""
    from trl import RewardConfig, RewardTrainer

    settings = RewardConfig(**common(work, work["micro_batch"], max_steps=work["steps"]))
    pairs = Dataset.from_list(work["pairs"])
    return RewardTrainer(
        model=reward(), args=settings, train_dataset=pairs, processing_class=tokenizer, callbacks=[clock]
    )


def dpo(work: dict[str, Any], policy: Any, reward: Any, tokenizer: Any, clock: Clock) -> Any:
    """TRL's DPO: a row for each pair, the reference read in every step."""
    from trl import DPOConfig, DPOTrainer

    settings = DPOConfig(**common(work, work["micro_batch"], max_steps=work["steps"]), beta=0.1)
    pairs = Dataset.from_list(work["pairs"])
    return DPOTrainer(
        model=policy(),
        ref_model=policy(),
        args=settings,
        train_dataset=pairs,
        processing_class=tokenizer,
        callbacks=[clock],
    )


TRAINERS = {"ppo": ppo, "rloo": rloo, "reward": reward_model, "dpo": dpo}


def main() -> None:
    """Read the work from standard input, train, and print the seconds of each step and the peak of memory, in MiB."""
    work = json.load(sys.stdin)
    torch.set_num_threads(work["threads"])
    torch.manual_seed(1)
    models, clock = Path(work["models"]), Clock()
    tokenizer = AutoTokenizer.from_pretrained(models / "sft", padding_side="left")

    def policy() -> Any:
        return AutoModelForCausalLM.from_pretrained(models / "sft", dtype=torch.float32)

    def reward() -> Any:
        path = models / "reward"
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)

    trainer = TRAINERS[work["method"]](work, policy, reward, tokenizer, clock)
    start = time.perf_counter()
    trainer.train()
    seconds = [after - before for before, after in pairwise([start, *clock.ends])]
    if len(seconds) != work["steps"]:
        sys.exit(f"TRL made {len(seconds)} steps, not {work['steps']}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak_mib": peak}))


if __name__ == "__main__":
    main()
