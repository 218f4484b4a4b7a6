"""The bias of the gradient: the expectation of PPO's gradient over all responses, compared with the exact gradient of
J = E[R] − β·KL(π ‖ π_ref)."""

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.models.masked import zero_padding
from rlhf_core.ppo.credit import assign_credit
from rlhf_core.ppo.objective import Pass, losses_of
from rlhf_core.ppo.rollout import Credit, Rollout, Scores
from rlhf_core.ppo.trainer import PPOTrainer
from tests.rlhf_core.ppo.optimum.exact import batch_of, token_logprobs
from tests.rlhf_core.ppo.optimum.problems import Problem, Response


@dataclass(frozen=True)
class Bias:
    """How far an expected gradient is from the true one."""

    cosine: float
    relative_l2: float
    """‖g − g*‖ / ‖g*‖."""

    @classmethod
    def of(cls, gradient: Float[Tensor, "parameters"], true: Float[Tensor, "parameters"]) -> "Bias":
        """Compare two gradients."""
        cosine = torch.nn.functional.cosine_similarity(gradient, true, dim=0)
        return cls(cosine.item(), ((gradient - true).norm() / true.norm()).item())


def gradient_bias(trainer: PPOTrainer, problem: Problem) -> dict[str, Bias]:
    """The bias at the current policy: with the critic as it is (`critic`), and with the expected return of every state
    instead of its values (`exact_critic`; the same where there is no critic)."""
    rollout, chances = every_response(trainer, problem)
    scores = trainer.score(rollout)
    true = true_gradient(trainer, problem, scores.used[: len(problem.responses)])
    returns = expected_returns(rollout, trainer.config, scores, trainer.controller.coef, chances)
    known = replace(rollout, old_values=returns) if trainer.models.has_critic else rollout
    return {
        name: Bias.of(expected_gradient(trainer, seen, scores, chances), true)
        for name, seen in (("critic", rollout), ("exact_critic", known))
    }


@torch.no_grad()
def every_response(trainer: PPOTrainer, problem: Problem) -> tuple[Rollout, Float[Tensor, "batch"]]:
    """A rollout with each response once, and the probabilities of the responses under the policy."""
    models, temperature, device = trainer.models, trainer.config.temperature, trainer.models.policy.device
    batch = batch_of(problem, device)
    old = token_logprobs(models.policy, problem, temperature)
    with models.as_reference() as reference:
        ref_logprobs = token_logprobs(reference, problem, temperature)
    rows, end = len(problem.responses), problem.tokenizer.eos_token_id
    rollout = Rollout(
        prompts=[problem.prompt] * rows,
        prompt_ids=[problem.prompt_ids] * rows,
        response_ids=[list(response) for response in problem.responses],
        texts=[""] * rows,
        ended=torch.tensor([response[-1] == end for response in problem.responses], device=device),
        mask=batch.mask,
        engine_logprobs=old,
        old_logprobs=old,
        ref_logprobs=ref_logprobs,
        ref_kl=torch.zeros_like(old),
        old_entropy=torch.zeros_like(old),
        old_values=zero_padding(models.read(batch, lambda p: p)[1], batch.mask),
    )
    return rollout, old.double().sum(dim=1).exp()


def true_gradient(
    trainer: PPOTrainer, problem: Problem, scores: Float[Tensor, "responses"]
) -> Float[Tensor, "parameters"]:
    """∇ −(E[R] − β·KL(π ‖ π_ref)) by autograd through the exact probabilities of all responses."""
    temperature = trainer.config.temperature
    with torch.no_grad(), trainer.models.as_reference() as model:
        reference = token_logprobs(model, problem, temperature).double().sum(dim=1)
    logprobs = token_logprobs(trainer.models.policy, problem, temperature).double().sum(dim=1)
    objective = (logprobs.exp() * (scores.double() - trainer.controller.coef * (logprobs - reference))).sum()
    return _flat(torch.autograd.grad(-objective, _parameters(trainer), allow_unused=True), trainer)


def expected_gradient(
    trainer: PPOTrainer, rollout: Rollout, scores: Scores, chances: Float[Tensor, "batch"]
) -> Float[Tensor, "parameters"]:
    """Σ π(response)·∇loss(response), each loss from `objective.losses_of`, without the critic's term, times the
    deviations by which whitening (of an infinite batch) and GRPO divide."""
    credit, deviation = expected_credit(trainer, rollout, scores, chances)
    total = torch.zeros(sum(parameter.numel() for parameter in _parameters(trainer)), dtype=torch.float64)
    for row, chance in enumerate(chances.tolist()):
        gradient = torch.autograd.grad(
            policy_part(trainer, rollout, credit, row), _parameters(trainer), allow_unused=True
        )
        total += chance * _flat(gradient, trainer)
    return total * credit.scale * deviation


def expected_credit(
    trainer: PPOTrainer, rollout: Rollout, scores: Scores, chances: Float[Tensor, "batch"]
) -> tuple[Credit, float]:
    """The credit of each response in an infinite batch, where baselines and whitening weigh each response by its
    probability. Also the deviation by which GRPO divides the advantages, but no KL in the loss (1 for the others)."""
    config, mask = trainer.config, rollout.mask
    plain = assign_credit(rollout, scores, ungrouped(config), trainer.controller.coef)
    kl, rewards = plain.kl, plain.rewards
    if trainer.models.has_critic:
        advantages, returns = plain.advantages, plain.returns
        group = 1.0
    else:
        returns = rewards.sum(dim=1, keepdim=True) * mask
        whole = rewards.sum(dim=1).double()
        centred = whole - (chances * whole).sum() / chances.sum()
        group = ((chances * centred**2).sum() / chances.sum()).sqrt().item() if config.advantage == "grpo" else 1.0
        advantages = ((centred / group)[:, None] * mask.double()).float()
    if not config.whiten_advantages:
        return Credit(kl, rewards, advantages, returns, advantages, 1.0, plain.trained), group
    weight = chances[:, None] * mask.double()
    mean = (weight * advantages).sum() / weight.sum()
    deviation = ((weight * (advantages - mean) ** 2).sum() / weight.sum()).sqrt().clamp(min=1e-4)
    white = ((advantages - mean) / deviation * mask).float()
    return Credit(kl, rewards, advantages, returns, white, deviation.item(), plain.trained), group


def ungrouped(config: PPOConfig) -> PPOConfig:
    """The same rewards, for a rollout that has each response once, in no group."""
    return config if config.advantage == "gae" else config.model_copy(update={"advantage": "reinforce"})


def expected_returns(
    rollout: Rollout, config: PPOConfig, scores: Scores, kl_coef: float, chances: Float[Tensor, "batch"]
) -> Float[Tensor, "batch time"]:
    """The discounted return that is expected from each state, over all responses that pass through it; 0 on
    padding."""
    rewards = assign_credit(rollout, scores, ungrouped(config), kl_coef).rewards
    returns, later = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        later = rewards[:, t] + config.gamma * later
        returns[:, t] = later
    sums: dict[Response, float] = defaultdict(float)
    mass: dict[Response, float] = defaultdict(float)
    places = [(row, t) for row, ids in enumerate(rollout.response_ids) for t in range(len(ids))]
    for row, t in places:
        prefix = tuple(rollout.response_ids[row][:t])
        sums[prefix] += chances[row].item() * returns[row, t].item()
        mass[prefix] += chances[row].item()
    values = torch.zeros_like(returns)
    for row, t in places:
        prefix = tuple(rollout.response_ids[row][:t])
        values[row, t] = sums[prefix] / max(mass[prefix], 1e-300)
    return values


def policy_part(trainer: PPOTrainer, rollout: Rollout, credit: Credit, row: int) -> Float[Tensor, ""]:
    """The loss of one response after all warm-ups, without the critic's term."""
    config = trainer.config
    forward = Pass.over(rollout.batch([row], trainer.pad_id), [row], rollout, credit, trainer.models, config)
    losses = losses_of(forward, config, trainer.controller.coef)
    return losses["total_loss"] - (config.vf_coef * losses["value_loss"] if config.has_critic else 0.0)


def _parameters(trainer: PPOTrainer) -> list[torch.nn.Parameter]:
    return trainer.models.trained()["policy"]


def _flat(gradients: tuple[Tensor | None, ...], trainer: PPOTrainer) -> Float[Tensor, "parameters"]:
    """One vector in float64; 0 for parameters without gradient."""
    parts = [
        torch.zeros(parameter.numel()) if gradient is None else gradient.flatten().cpu()
        for gradient, parameter in zip(gradients, _parameters(trainer), strict=True)
    ]
    return torch.cat(parts).double()
