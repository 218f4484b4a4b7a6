"""Exact quantities of a problem: the probability of every response, the closed-form optimum, and the resting point, the
policy at which the expected update is zero."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.models.batch import TokenBatch, pad_batch, predict, response_logits
from rlhf_core.models.token_logprobs import logprobs_and_entropy
from rlhf_core.ppo.scoring import ScoreNormalisation
from tests.rlhf_core.ppo.optimum.problems import Problem, Response


def batch_of(problem: Problem, device: torch.device | str = "cpu") -> TokenBatch:
    """Every response of the problem behind its prompt."""
    pad = int(problem.tokenizer.pad_token_id)
    return pad_batch([problem.prompt_ids] * len(problem.responses), problem.responses, pad, device)


def token_logprobs(model: PreTrainedModel, problem: Problem, temperature: float) -> Float[Tensor, "responses time"]:
    """log π of each token of each response, in nats, with gradient; 0 on padding."""
    batch = batch_of(problem, model.device)
    return batch.spread(logprobs_and_entropy(predict(model, batch), batch.response_tokens, temperature)[0])


@torch.no_grad()
def probabilities(model: PreTrainedModel, problem: Problem, temperature: float) -> Float[Tensor, "responses"]:
    """π of each response, float64. They sum to 1: the list of responses is complete."""
    return token_logprobs(model, problem, temperature).double().sum(dim=1).exp().cpu()


def reference_statistics(problem: Problem, reference: Float[Tensor, "responses"]) -> ScoreNormalisation:
    """Mean and standard deviation of the raw scores under the reference policy."""
    raw = torch.tensor([problem.scores[response] for response in problem.responses], dtype=torch.float64)
    mean = (reference * raw).sum()
    return ScoreNormalisation(mean.item(), (reference * (raw - mean) ** 2).sum().sqrt().item())


def optimum(
    reference: Float[Tensor, "responses"], scores: Float[Tensor, "responses"], kl_coef: float
) -> Float[Tensor, "responses"]:
    """π* = π_ref·exp(R/β)/Z; with β = 0 the reference on the responses of the highest score.

    Source: Ziegler et al. 2019, equation 3; rule 8.
    """
    if kl_coef == 0:
        best = torch.where(scores == scores.max(), reference, 0)
        return best / best.sum()
    return (reference.log() + scores / kl_coef).softmax(dim=0)


def total_variation(one: Float[Tensor, "responses"], other: Float[Tensor, "responses"]) -> float:
    """½ Σ |p − q|: 0 for equal distributions, 1 for distributions that share nothing."""
    return float((one - other).abs().sum()) / 2


def divergence(one: Float[Tensor, "responses"], other: Float[Tensor, "responses"]) -> float:
    """KL(p ‖ q) in nats."""
    return float(torch.xlogy(one, one / other).sum())


@dataclass(frozen=True)
class Forces:
    """The terms of the objective in each state, in units of the score."""

    kl_coef: float
    entropy: float
    """The coefficient of the entropy bonus; under whitening times the deviation of the advantages."""
    gamma: float
    future_kl: bool
    """Whether the KL of later tokens counts for a token: in the reward yes, in the loss no."""

    @classmethod
    def of(cls, config: PPOConfig, kl_coef: float, scale: float) -> "Forces | None":
        """The terms of the settings; None without a closed form of the resting point: k3 in the loss, and answers that
        weigh by their length."""
        if config.kl.estimator == "k3" or config.loss_average == "answer_means":
            return None
        return cls(kl_coef, config.entropy_coef * scale, config.gamma, config.kl.penalty == "reward")


def resting_point(
    reference: PreTrainedModel, problem: Problem, temperature: float, scores: Float[Tensor, "responses"], forces: Forces
) -> Float[Tensor, "responses"]:
    """The policy at which the expected update of a trained critic is zero, by backward induction over all prefixes.

    In each state π(a) ∝ (π_ref(a)^β·exp(Q(a)))^(1/(β + c)), c the entropy bonus. It is π* where c = 0, γ = 1 and the
    KL is in the reward.
    """
    next_tokens = _next_token_logprobs(reference, problem, temperature)
    score_of: dict[Response, float] = dict(zip(problem.responses, scores.tolist(), strict=True))
    policy: dict[Response, Tensor] = {}

    def value(prefix: Response) -> float:
        if prefix in score_of:
            return score_of[prefix]
        discount = [1.0 if (*prefix, token) in score_of else forces.gamma for token in range(problem.vocabulary)]
        q = torch.tensor([discount[a] * value((*prefix, a)) for a in range(problem.vocabulary)], dtype=torch.float64)
        policy[prefix] = _state(next_tokens[prefix], q, forces)
        kl = (policy[prefix].exp() * (policy[prefix] - next_tokens[prefix])).nan_to_num().sum()
        gain = (policy[prefix].exp() * q).sum()
        return float(gain - forces.kl_coef * kl) if forces.future_kl else float(gain)

    value(())
    logprobs = [sum(policy[r[:t]][r[t]].item() for t in range(len(r))) for r in problem.responses]
    return torch.tensor(logprobs, dtype=torch.float64).exp()


def _state(reference: Float[Tensor, "vocab"], q: Float[Tensor, "vocab"], forces: Forces) -> Float[Tensor, "vocab"]:
    """log π of one state."""
    strength = forces.kl_coef + forces.entropy
    if strength == 0:
        return torch.where(q == q.max(), reference, -torch.inf).log_softmax(dim=0)
    return ((q + forces.kl_coef * reference) / strength).log_softmax(dim=0)


@torch.no_grad()
def _next_token_logprobs(model: PreTrainedModel, problem: Problem, temperature: float) -> dict[Response, Tensor]:
    """log π(·|prefix) for every prefix that is no whole response."""
    batch = batch_of(problem, model.device)
    logits = batch.spread(response_logits(model, batch)).double().cpu()
    logprobs = (logits / temperature).log_softmax(dim=-1)
    return {r[:t]: logprobs[row, t] for row, r in enumerate(problem.responses) for t in range(len(r))}
