"""Peak memory of each PPO process with whole and with divided models, on the CPU with gloo:

    python benchmarks/sharding_memory.py [--hidden 512] [--layers 8]

It trains two steps on random models and prints a table of this machine's figures.
"""

import argparse
import json
import os
import resource
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.scorer import Scored
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.scoring import RewardSource, ScoreNormalisation
from rlhf_core.ppo.trainer import PPOTrainer

ROOT = Path(__file__).parents[1]
CASES = ((1, "none"), (2, "none"), (2, "fsdp"))
WORKER = "LEASH_BENCHMARK_SHARDING"
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "262144"}
"""glibc then returns freed weights to the system; else it keeps gathered ones, and the peak is that of whole models."""


def trainer_of(sharding: str, hidden: int, layers: int) -> PPOTrainer:
    """PPO with a critic of its own, on random models."""
    tiny = runpy.run_path(str(ROOT / "tests/rlhf_core/conftest.py"))
    size = LlamaConfig(
        vocab_size=tiny["VOCABULARY"],
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=tiny["CONTEXT"],
        num_labels=1,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(1)
    config = PPOConfig(**tiny["tiny_ppo_values"](sharding=sharding, critic={"init": "sft"}))
    policy, reference = (AutoModelForCausalLM.from_config(size).eval() for _ in range(2))
    reference.load_state_dict(policy.state_dict())
    models = ActorCritic(config, policy, reference, AutoModelForSequenceClassification.from_config(size).eval())
    source = RewardSource(
        lambda answers: Scored([float(len(ids)) for ids in answers.response_ids]), ScoreNormalisation(3.0, 2.0)
    )
    return PPOTrainer(config, models, tiny["tiny_tokenizer"](), source, tiny["tiny_prompts"](), seed=1)


def megabytes(field: str) -> float:
    """`VmRSS` of this process now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def measure(sharding: str, hidden: int, layers: int) -> None:
    """Two steps; every process prints its memory as a line of JSON."""
    torch.set_num_threads(1)
    before = megabytes("VmRSS")
    trainer = trainer_of(sharding, hidden, layers)
    for _ in range(2):
        trainer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"libraries": before, "peak": peak, "after": megabytes("VmRSS")}), flush=True)


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    size: Any = parser.parse_args()
    if sharding := os.environ.get(WORKER):
        measure(sharding, size.hidden, size.layers)
        return
    print("| processes | sharding | peak RSS of a process, MB | after the last step, MB | libraries alone, MB |")
    print("|---|---|---|---|---|", flush=True)
    for count, sharding in CASES:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        arguments = ["--hidden", str(size.hidden), "--layers", str(size.layers)]
        environment = os.environ | RETURNED | {WORKER: sharding, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, __file__, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        peak, after, libraries = (max(row[name] for row in rows) for name in ("peak", "after", "libraries"))
        print(f"| {count} | `{sharding}` | {peak:.0f} | {after:.0f} | {libraries:.0f} |", flush=True)


if __name__ == "__main__":
    main()
