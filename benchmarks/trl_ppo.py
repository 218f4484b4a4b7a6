"""The same work in TRL 1.12.0, the last release with PPO. Run by `ppo_throughput.py --trl PYTHON`, in an environment
of its own (`pip install trl==1.12.0 torch==2.13.0`); imports nothing of Leash. The last line printed is JSON.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    set_seed,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

LEARNING_RATE = 1e-6


class Clock(TrainerCallback):
    """When each update ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *arguments, **options) -> None:  # type: ignore[no-untyped-def]
        """Note the time."""
        self.ends.append(time.perf_counter())


def main() -> None:
    """Train for some updates and print their median seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--sft", "--reward", "--prompts"):
        parser.add_argument(name, required=True)
    for name in ("--updates", "--batch", "--micro-batch", "--epochs", "--max-new-tokens", "--threads"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    set_seed(1)
    clock = Clock()
    trainer = build(options, clock)
    start = time.perf_counter()
    trainer.train()
    ends = [start, *clock.ends]
    seconds = [after - before for before, after in pairwise(ends)]
    if len(seconds) != options.updates:
        sys.exit(f"TRL made {len(seconds)} updates, {options.updates} were asked for")
    update = statistics.median(seconds[1:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"s_per_update": update, "samples_per_s": options.batch / update, "peak_mib": peak}))


def build(options: argparse.Namespace, clock: Clock) -> PPOTrainer:
    """TRL's trainer with a critic of its own, float32, no gradient checkpointing, the batch of the command line."""
    tokenizer = AutoTokenizer.from_pretrained(options.sft, padding_side="left")
    prompts = [json.loads(line)["prompt"] for line in Path(options.prompts).read_text("utf-8").strip().split("\n")]
    rows = [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        for prompt in prompts
    ]
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-ppo-"),
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.batch // options.micro_batch,
        num_mini_batches=1,
        local_rollout_forward_batch_size=options.micro_batch,
        total_episodes=options.updates * options.batch,
        num_ppo_epochs=options.epochs,
        response_length=options.max_new_tokens,
        learning_rate=LEARNING_RATE,
        temperature=1.0,
        kl_coef=0.05,
        missing_eos_penalty=1.0,
        stop_token="eos",
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
    )
    scalar = AutoModelForSequenceClassification.from_pretrained
    return PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(options.sft),
        ref_model=AutoModelForCausalLM.from_pretrained(options.sft),
        reward_model=scalar(options.reward, num_labels=1),
        value_model=scalar(options.reward, num_labels=1),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        callbacks=[clock],
    )


if __name__ == "__main__":
    main()
