"""The variance of the policy gradient with and without a baseline, measured on folders of your own.

    python benchmarks/gradient_variance.py --seeds 1 2 3

One rollout per seed; then, at the policy that sampled, the plain policy gradient g = −Σ_t A_t·∇log π(a_t) of each
response, with each kind of advantage A from the same rewards. Without a baseline A is the whole return. Nothing is
whitened, so all have the same expectation, except for: the batch's own mean (a share of 1/B), the critic's error where
λ < 1, and GRPO, which weights prompts by 1/σ; its advantages are scaled to RLOO's by least squares. The table is
Markdown; the last line is JSON.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from setups import PROMPTS, ppo_settings, ppo_trainer

from rlhf_core.determinism import make_deterministic
from rlhf_core.models.hf import load_causal_lm
from rlhf_core.models.token_logprobs import logprobs_and_entropy
from rlhf_core.ppo.advantages import compute_gae, compute_group_advantages
from rlhf_core.ppo.credit import assign_credit
from rlhf_core.ppo.rollout import Rollout
from rlhf_core.ppo.trainer import PPOTrainer

NONE = "no baseline"
CRITIC_RATE = 6e-4


def main() -> None:
    """Measure each seed and print the ranges."""
    options = arguments().parse_args()
    runs = []
    for seed in options.seeds:
        runs.append(measure_seed(options, seed))
        print(f"seed {seed}: {json.dumps(runs[-1])}", file=sys.stderr)
    print(table(runs))
    print(json.dumps({"seeds": options.seeds, "runs": runs}))


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        type=Path,
        default="models",
        help="with sft: the reference, and the policy where none is named; and reward: the reward model, where the "
        "critic starts, too",
    )
    parser.add_argument("--policy", help="folder of the policy that samples")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSONL rows with a `prompt`, as ingest writes")
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--samples-per-prompt", type=int, default=4)
    parser.add_argument("--score", choices=["normalised", "raw"], default="normalised")
    parser.add_argument("--kl-coef", type=float, default=0.1)
    parser.add_argument("--critic-warmup", type=int, default=0, help="steps of the critic alone, on other rollouts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def measure_seed(options: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """All kinds of advantages on one rollout; with a warm-up, GAE also with the critic after it."""
    trainer = build(options, seed)
    trainer.steps_done = options.critic_warmup
    rollout = trainer.rollout()
    weights = advantages_of(trainer, rollout)
    if options.critic_warmup:
        trainer.steps_done = 0
        for _ in range(options.critic_warmup):
            trainer.step()
        again = trainer.rollout()
        if again.response_ids != rollout.response_ids:
            raise RuntimeError("the critic's warm-up moved the policy")
        warm = advantages_of(trainer, again)
        weights |= {f"{name}, after the warm-up": warm[name] for name in warm if name.startswith("GAE")}
    return compare(trainer, rollout, weights)


def build(options: argparse.Namespace, seed: int) -> PPOTrainer:
    """PPO with several answers to a prompt."""
    make_deterministic(seed, options.threads)
    settings = ppo_settings(
        options.responses,
        64,
        2,
        options.max_new_tokens,
        steps=options.critic_warmup + 1,
        micro_batch_tokens=1024,
        samples_per_prompt=options.samples_per_prompt,
        kl={"coef": options.kl_coef},
        critic={"learning_rate": CRITIC_RATE, "warmup_steps": options.critic_warmup},
        score={"normalise": options.score == "normalised", "clip": 1e9, "missing_eos_penalty": 1.0},
    )
    trainer: PPOTrainer = ppo_trainer(options.models, options.prompts, settings, seed)
    if options.policy:
        trainer.models.policy.load_state_dict(load_causal_lm(options.policy).state_dict())
    return trainer


def advantages_of(trainer: PPOTrainer, rollout: Rollout) -> dict[str, Tensor]:
    """The advantages of every token by each kind, [B, T] each, not whitened."""
    config, mask = trainer.config, rollout.mask
    rewards = assign_credit(rollout, trainer.score(rollout), config, trainer.controller.coef).rewards
    returns, each = rewards.sum(dim=1), config.samples_per_prompt
    whole = {NONE: returns, "REINFORCE": compute_group_advantages(returns, "reinforce")}
    if each > 1:
        rloo, grpo = (compute_group_advantages(returns, kind, each) for kind in ("rloo", "grpo"))
        whole |= {"RLOO": rloo, "GRPO, scaled": grpo * (grpo @ rloo) / (grpo @ grpo)}
    nothing = torch.zeros_like(rollout.old_values)
    weights = {name: values[:, None] * mask for name, values in whole.items()}
    weights["no baseline, rewards to come"] = gae(rewards, nothing, 1.0, mask)
    return weights | {f"GAE λ={lam:g}": gae(rewards, rollout.old_values, lam, mask) for lam in (1.0, 0.95)}


def gae(rewards: Tensor, values: Tensor, lam: float, mask: Tensor) -> Tensor:
    """Advantages [B, T] with γ = 1."""
    return compute_gae(rewards, torch.nn.functional.pad(values, (0, 1)), 1.0, lam, mask)[0]


@dataclass
class Moments:
    """Running sums of vectors: their mean, and the trace of their covariance."""

    count: int = 0
    total: Tensor | float = 0.0
    squares: float = 0.0

    def add(self, vector: Tensor) -> None:
        """Add one vector."""
        exact = vector.double()
        self.count, self.total = self.count + 1, self.total + exact
        self.squares += exact.square().sum().item()

    @property
    def mean_square(self) -> float:
        """‖mean‖²."""
        return (torch.as_tensor(self.total) / self.count).square().sum().item()

    @property
    def trace(self) -> float:
        """Of the unbiased covariance."""
        return (self.squares - self.count * self.mean_square) / (self.count - 1)


def compare(trainer: PPOTrainer, rollout: Rollout, weights: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """For each kind of advantages: `variance`, the trace of the covariance of one response's gradient, divided by that
    without a baseline; `variance_of_mean`, the same for the batch's mean, with prompts as the independent units;
    `signal_to_noise`, ‖E g‖ over the deviation of that mean, where ‖E g‖² is corrected for noise (at least 0)."""
    each = trainer.config.samples_per_prompt
    responses, prompts = defaultdict[str, Moments](Moments), defaultdict[str, Moments](Moments)
    for first in range(0, len(rollout.response_ids), each):
        groups: dict[str, Any] = defaultdict(float)
        for row in range(first, first + each):
            for name, gradient in gradients(trainer, rollout, row, weights).items():
                responses[name].add(gradient)
                groups[name] = groups[name] + gradient / each
        for name, mean in groups.items():
            prompts[name].add(mean)
    return {
        name: {
            "variance": responses[name].trace / responses[NONE].trace,
            "variance_of_mean": prompts[name].trace / prompts[NONE].trace,
            "signal_to_noise": signal_to_noise(prompts[name]),
        }
        for name in weights
    }


def signal_to_noise(units: Moments) -> float:
    """Of the mean of independent units."""
    return float(max(0.0, units.mean_square * units.count / units.trace - 1.0) ** 0.5)


def gradients(trainer: PPOTrainer, rollout: Rollout, row: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """−Σ_t A_t·∇log π(a_t) of one response, for each kind of advantages; one flat vector each."""
    parameters = trainer.models.trained()["policy"]
    batch = rollout.batch([row], trainer.pad_id)
    predictions, _ = trainer.models.read(batch, lambda p: p)
    logprobs = batch.spread(logprobs_and_entropy(predictions, batch.response_tokens, trainer.config.temperature)[0])
    found = {}
    for name, table_ in weights.items():
        loss = -(table_[[row], : batch.time] * logprobs).sum()
        found[name] = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])
    return found


def table(runs: list[dict[str, dict[str, float]]]) -> str:
    """Markdown, a row for each kind of advantages: the range over the seeds."""
    lines = ["| advantages | variance | variance of the mean | signal to noise |", "|---|---|---|---|"]
    for name in runs[0]:
        columns = ([run[name][column] for run in runs] for column in runs[0][name])
        lines.append(f"| {name} | " + " | ".join(f"{min(c):.2f} – {max(c):.2f}" for c in columns) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
