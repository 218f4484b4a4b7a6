"""Seconds per PPO step and samples per second, on folders of your own, compared with TRL's last PPO.

    python benchmarks/ppo_throughput.py --updates 6
    python benchmarks/ppo_throughput.py … --trl PATH/TO/python     # an environment of its own with trl==1.12.0

The first update of either side is a warm-up and is not counted.
Each side runs in a process of its own, one after the other; the last line printed is JSON.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
LEARNING_RATE = 1e-6  # small: the lengths of the responses, and with them the work, stay what they are


def main() -> None:
    """Measure Leash, then TRL with --trl, and print one line each and one of JSON."""
    options = arguments().parse_args()
    if options.side == "leash":
        print(json.dumps(measure(options)))
        return
    own = ["--critic", options.critic, "--micro-batch-tokens", str(options.micro_batch_tokens), "--side", "leash"]
    ours = run_side([sys.executable, str(HERE), *work_of(options), *own])
    show("leash", ours)
    result = dict(ours)
    if options.trl:
        theirs = run_side([options.trl, str(HERE.with_name("trl_ppo.py")), *work_of(options)])
        show("trl", theirs)
        result |= {
            "trl": theirs,
            "speedup": ours["samples_per_s"] / theirs["samples_per_s"],
            "memory_ratio": ours["peak_mib"] / theirs["peak_mib"],
        }
        print(f"leash does {result['speedup']:.2f} times TRL's samples per second", file=sys.stderr)
    print(json.dumps(result))


def arguments() -> argparse.ArgumentParser:
    """The command line; `trl_ppo.py` takes the same work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft", default="models/sft", help="folder of the policy and its reference")
    parser.add_argument(
        "--reward", default="models/reward", help="folder of the reward model, where the critic starts too"
    )
    parser.add_argument(
        "--prompts", default="data/ingest/ppo_prompts.jsonl", help="JSONL rows with a `prompt`, as ingest writes"
    )
    parser.add_argument("--updates", type=int, default=6, help="PPO updates, the warm-up included")
    parser.add_argument("--batch", type=int, default=128, help="responses per update")
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="Leash's limit in tokens besides; 0: none")
    parser.add_argument("--critic", choices=["separate", "shared"], default="separate")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl", help="a Python with trl==1.12.0, to measure beside it")
    parser.add_argument("--side", choices=["leash"], help=argparse.SUPPRESS)
    return parser


def work_of(options: argparse.Namespace) -> list[str]:
    """The options that both sides share, as a command line."""
    names = ("sft", "reward", "prompts", "updates", "batch", "micro_batch", "epochs", "max_new_tokens", "threads")
    return [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def run_side(command: list[str]) -> dict[str, float]:
    """Run one side in a process of its own; the last line of its output is its result."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def show(name: str, result: dict[str, float]) -> None:
    """Print one line to stderr."""
    numbers = "  ".join(f"{key} {value:.3g}" for key, value in result.items())
    print(f"{name}: {numbers}", file=sys.stderr)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Medians over the updates after the first, in this process."""
    sys.path.insert(0, str(HERE.parents[1]))
    trainer = build(options)
    seconds, phases, tokens = [], [], []
    for _ in range(options.updates):
        start = time.perf_counter()
        row = trainer.step()
        seconds.append(time.perf_counter() - start)
        phases.append(dict(trainer.seconds))
        tokens.append(float(row["response_tokens_mean"] or 0.0))
    update = statistics.median(seconds[1:])
    return {
        "s_per_update": update,
        "samples_per_s": options.batch / update,
        "mean_response_tokens": statistics.mean(tokens[1:]),
        "s_per_token": update / (options.batch * statistics.mean(tokens[1:])),
        **{f"s_{name}": statistics.median(p[name] for p in phases[1:]) for name in phases[0]},
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The block `ppo` for the work of the command line."""
    return {
        "steps": options.updates,
        "batch_size": options.batch,
        "minibatches": 1,
        "micro_batch_size": options.micro_batch,
        "micro_batch_tokens": options.micro_batch_tokens or None,
        "ppo_epochs": options.epochs,
        "learning_rate": LEARNING_RATE,
        "clip_ratio": 0.2,
        "vf_coef": 0.1,
        "entropy_coef": 0.0,
        "gamma": 1.0,
        "lam": 0.95,
        "temperature": 1.0,
        "max_new_tokens": options.max_new_tokens,
        "whiten_advantages": True,
        "kl": {"coef": 0.05, "controller": "fixed", "target": 6.0, "horizon": 10000},
        "critic": {
            "kind": options.critic,
            "init": "reward",
            "learning_rate": LEARNING_RATE,
            "value_clip": 0.2,
            "clip_value": True,
            "warmup_steps": 0,
        },
        "optimizer": {"betas": [0.9, 0.999], "eps": 1e-8, "warmup_steps": 0, "decay": "none", "max_grad_norm": 1.0},
        "score": {"normalise": False, "clip": 1e9, "missing_eos_penalty": 1.0},
        "sample_every": options.updates,
    }


def build(options: argparse.Namespace, seed: int = 1, **changes):  # type: ignore[no-untyped-def]  # slow imports
    """The trainer as the stage `ppo` builds it, with the batch of the command line; `changes` replace settings."""
    from rlhf_core.config.ppo import PPOConfig
    from rlhf_core.data.tokenizer import load_tokenizer
    from rlhf_core.determinism import make_deterministic
    from rlhf_core.models.hf import load_causal_lm, load_scalar_model, map_scalar, place
    from rlhf_core.models.scorers import RewardModelScorer
    from rlhf_core.ppo.actor_critic import ActorCritic
    from rlhf_core.ppo.scoring import RewardSource, ScoreNormalisation, reference_scores
    from rlhf_core.ppo.trainer import PPOTrainer

    make_deterministic(seed, options.threads)
    tokenizer = load_tokenizer(options.sft)
    scorer = place(load_scalar_model(options.reward))
    config = PPOConfig.model_validate(settings(options) | changes)
    prompts = [json.loads(line)["prompt"] for line in Path(options.prompts).read_text("utf-8").strip().split("\n")]
    reference = place(load_causal_lm(options.sft))
    rewards = RewardModelScorer(scorer, int(tokenizer.pad_token_id), options.micro_batch)
    normalisation = ScoreNormalisation(0.0, 1.0)
    if config.score.normalise:
        normalisation = reference_scores(config, reference, tokenizer, rewards, prompts, seed).normalisation
    critic = load_scalar_model(options.reward) if config.needs_critic_model else None
    if critic is not None:
        map_scalar(critic, *normalisation.unit(config.score))
    models = ActorCritic(config, load_causal_lm(options.sft), reference, critic)
    return PPOTrainer(config, models, tokenizer, RewardSource(rewards, normalisation), prompts, seed)


if __name__ == "__main__":
    main()
