"""`PPOTrainer` trains on problems with a known optimum, and the distance of the policy to it is measured."""

import copy
from dataclasses import asdict
from typing import Any

import torch

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.determinism import make_deterministic
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.scoring import RewardSource
from rlhf_core.ppo.trainer import PPOTrainer
from tests.rlhf_core.ppo.optimum.exact import (
    Forces,
    divergence,
    optimum,
    probabilities,
    reference_statistics,
    resting_point,
    total_variation,
)
from tests.rlhf_core.ppo.optimum.gradient import every_response, expected_credit, gradient_bias
from tests.rlhf_core.ppo.optimum.problems import Problem, build_models, forced


def train(config: PPOConfig, problem: Problem, seed: int) -> dict[str, Any]:
    """Train on one problem to the end, and compare. Deterministic: equal arguments give equal numbers."""
    make_deterministic(seed, threads=1)
    trainer = build_trainer(config, problem, seed)
    at_reference = gradient_bias(trainer, problem)
    before = [parameter.detach().clone() for parameter in trainer.models.policy.parameters()]
    while trainer.steps_done < trainer.config.steps:
        trainer.step()
    result = compare(trainer, problem)
    go_half_way_back(trainer, before)
    biases = {"reference": at_reference, "half_way": gradient_bias(trainer, problem)}
    result["gradient_bias"] = {
        place: {critic: asdict(bias) for critic, bias in found.items()} for place, found in biases.items()
    }
    return result


def build_trainer(config: PPOConfig, problem: Problem, seed: int) -> PPOTrainer:
    """A `PPOTrainer` on a problem, with scores normalised by their exact mean and deviation under the reference."""
    config = forced(config, problem)
    policy, critic = build_models(problem)
    reference = probabilities(policy, problem, config.temperature)
    models = ActorCritic(
        config,
        policy,
        reference=copy.deepcopy(policy) if config.lora is None else None,
        critic=critic if config.needs_critic_model else None,
        seed=seed,
    )
    return PPOTrainer(
        config,
        models,
        tokenizer=problem.tokenizer,
        source=RewardSource(problem, reference_statistics(problem, reference)),
        prompts=[problem.prompt] * config.batch_size,
        seed=seed,
    )


@torch.no_grad()
def compare(trainer: PPOTrainer, problem: Problem) -> dict[str, Any]:
    """Distances between the policy, its reference, π*, and the resting point of the settings."""
    config, kl_coef = trainer.config, trainer.controller.coef
    rollout, chances = every_response(trainer, problem)
    scores = trainer.score(rollout)
    used = scores.used.double().cpu()
    policy = probabilities(trainer.models.policy, problem, config.temperature)
    credit, group = expected_credit(trainer, rollout, scores, chances)
    price = kl_coef * group if config.kl.penalty == "loss" else kl_coef
    forces = Forces.of(config, price, credit.scale * group)
    with trainer.models.as_reference() as model:
        reference = probabilities(model, problem, config.temperature)
        settled = None if forces is None else resting_point(model, problem, config.temperature, used, forces)
    best = optimum(reference, used, kl_coef)
    return {
        "total_variation": total_variation(policy, best),
        "total_variation_to_resting_point": None if settled is None else total_variation(policy, settled),
        "total_variation_between": None if settled is None else total_variation(settled, best),
        "total_variation_of_reference": total_variation(reference, best),
        "responses": len(problem.responses),
        "most_likely_of_optimum": best.max().item(),
        "kl": divergence(policy, reference),
        "kl_of_optimum": divergence(best, reference),
        "reward": (policy * used).sum().item(),
        "reward_of_optimum": (best * used).sum().item(),
        "kl_coef": kl_coef,
        "steps": trainer.steps_done,
    }


@torch.no_grad()
def go_half_way_back(trainer: PPOTrainer, before: list[torch.Tensor]) -> None:
    """The policy's parameters become the mean of what they are and what they were."""
    for parameter, old in zip(trainer.models.policy.parameters(), before, strict=True):
        parameter.copy_((parameter + old) / 2)
