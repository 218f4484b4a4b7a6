"""Combinations of settings that the configuration refuses, and the effect that each would have on a bandit, whose
expected updates are followed to their end in float64."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import torch
from jaxtyping import Float
from pydantic import ValidationError
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf_core.config.ppo import KLConfig, PPOConfig
from rlhf_core.inspect.audit.exact import optimum, total_variation
from rlhf_core.inspect.audit.gradient import Bias
from rlhf_core.inspect.audit.problems import Problem, build_models, merged, nested
from rlhf_core.ppo.kl import estimate_kl

ARMS, KL_COEF = 16, 0.5
"""The bandit of rule 8: normal scores of standard deviation 1, β = 0.5."""
STEPS, LEARNING_RATE = 400, 0.1
ESTIMATES = ("k1", "k2", "k3", "full")

Arms = Float[Tensor, "arms"]
Sampling = Callable[[Arms], Arms]
"""From log π to the probabilities of sampling; torch.exp samples from π."""


def refused_combinations(config: PPOConfig) -> list[dict[str, Any]]:
    """Each combination that the validation refuses, with the reason, and `measured` (`Bandit.measure`)."""
    bandit = Bandit()
    reasons = [(combination, refusal(config, combination)) for combination in combinations()]
    return [
        {"combination": dict(combination), "reason": reason, "measured": bandit.measure(combination)}
        for combination, reason in reasons
        if reason is not None
    ]


def refusal(config: PPOConfig, combination: Mapping[str, Any]) -> str | None:
    """The validation's message for the settings with this combination; None where they are valid."""
    try:
        PPOConfig.model_validate(merged(config.model_dump(), nested(combination)))
    except ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Value error, ")
    return None


def combinations() -> Iterator[dict[str, Any]]:
    """Every place of the KL with every estimator, every option that changes the sampling distribution, and an adaptive
    β that oscillates or stays 0."""
    for penalty in get_args(KLConfig.model_fields["penalty"].annotation):
        for estimator in get_args(KLConfig.model_fields["estimator"].annotation):
            yield {"kl.penalty": penalty, "kl.estimator": estimator}
    yield from ({"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}, {"min_new_tokens": 1}, {"repetition_penalty": 1.2})
    yield {"kl.controller": "adaptive", "kl.horizon": 1}
    yield {"kl.controller": "adaptive", "kl.coef": 0.0}


class Bandit:
    """Sixteen one-token responses, their reference probabilities and scores."""

    def __init__(self) -> None:
        problem = Problem("bandit", vocabulary=ARMS, length=1, unit=1.0, optimizer_steps=STEPS)
        self.prompt = torch.tensor([problem.prompt_ids])
        self.end = int(problem.tokenizer.eos_token_id)
        self.tokens = [response[0] for response in problem.responses]
        self.scores = torch.tensor([problem.scores[response] for response in problem.responses], dtype=torch.float64)
        with torch.no_grad():
            logits = build_models(problem)[0](self.prompt).logits[0, -1, self.tokens]
        self.reference = logits.double().log_softmax(dim=0)
        self.best = optimum(self.reference.exp(), self.scores, KL_COEF)

    def measure(self, combination: Mapping[str, Any]) -> dict[str, float] | None:
        """At the end of the expected updates: total variation to π*, the KL (nats) as estimated and exact; half way to
        π*: the bias of the gradient. None for a combination that a bandit cannot show."""
        (key, value), *_ = combination.items()
        if key == "kl.penalty" and combination["kl.estimator"] in ESTIMATES:
            return self._follow(torch.exp, value, combination["kl.estimator"])
        sampling = self._sampling(key, value)
        return None if sampling is None else self._follow(sampling, "reward", "k1")

    def _follow(self, sampling: Sampling, penalty: str, estimator: str) -> dict[str, float]:
        logits = self.reference.clone().requires_grad_()
        optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / STEPS)
            (logits.grad,) = torch.autograd.grad(self._loss(logits, sampling, penalty, estimator), logits)
            optimizer.step()
        logprobs = logits.detach().log_softmax(dim=0)
        difference = logprobs - self.reference
        bias = self._bias_half_way(sampling, penalty, estimator)
        return {
            "total_variation": total_variation(logprobs.exp(), self.best),
            "gradient_bias": bias.relative_l2,
            "gradient_cosine": bias.cosine,
            "kl_estimate": (sampling(logprobs) * difference).sum().item(),
            "kl": (logprobs.exp() * difference).sum().item(),
        }

    def _loss(self, logits: Arms, sampling: Sampling, penalty: str, estimator: str) -> Float[Tensor, ""]:
        """The expected loss of one update: −A·log π with the KL in the reward, or as a term of the loss."""
        logprobs = logits.log_softmax(dim=0)
        chances = sampling(logprobs.detach())
        policy = logits if estimator == "full" else logprobs
        kl = estimate_kl(policy, self.reference, estimator).expand(ARMS)  # type: ignore[arg-type]
        reward = self.scores - KL_COEF * kl.detach() if penalty == "reward" else self.scores
        advantage = reward - (chances * reward).sum()
        loss = -(chances * advantage * logprobs).sum()
        return loss + KL_COEF * (chances * kl).sum() if penalty == "loss" else loss

    def _bias_half_way(self, sampling: Sampling, penalty: str, estimator: str) -> Bias:
        """At π_ref·exp(R/2β)/Z."""
        logits = (self.reference + self.scores / (2 * KL_COEF)).requires_grad_()
        (gradient,) = torch.autograd.grad(self._loss(logits, sampling, penalty, estimator), logits)
        logprobs = logits.log_softmax(dim=0)
        objective = (logprobs.exp() * (self.scores - KL_COEF * (logprobs - self.reference))).sum()
        (true,) = torch.autograd.grad(-objective, logits)
        return Bias.of(gradient, true)

    def _sampling(self, key: str, value: Any) -> Sampling | None:
        """Sampling through transformers' processor for a key of generation; None for other keys."""
        processors: dict[str, Callable[[], LogitsProcessor]] = {
            "top_k": lambda: TopKLogitsWarper(value),
            "top_p": lambda: TopPLogitsWarper(value),
            "min_p": lambda: MinPLogitsWarper(value),
            "min_new_tokens": lambda: MinNewTokensLengthLogitsProcessor(
                self.prompt.shape[1], value, self.end, device="cpu"
            ),
            "repetition_penalty": lambda: RepetitionPenaltyLogitsProcessor(value),
        }
        if key not in processors:
            return None
        processor = processors[key]()

        def chances(logprobs: Arms) -> Arms:
            by_token = torch.empty_like(logprobs)
            by_token[self.tokens] = logprobs
            left: Arms = processor(self.prompt, by_token[None])[0].softmax(dim=0)
            return left[self.tokens]

        return chances
