"""Seconds, tokens and operations of the phases of a PPO step."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.models.sampling import Sampled
from rlhf_core.ppo.trainer import PPOTrainer

PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 operations per second by a part of the GPU's name, from NVIDIA's data sheets; the first that fits."""


@dataclass
class Clock:
    """Seconds of the phases of the last step. It wraps the engine and the scorer of a trainer, and waits for the GPU at
    the ends of phases."""

    trainer: PPOTrainer
    seconds: dict[str, float] = field(default_factory=dict)
    answers: Answers | None = None
    """Prompts and responses of the last step."""

    def __post_init__(self) -> None:
        engine, source = self.trainer.engine, self.trainer.scoring.source
        self._engine = engine
        self._scorer = source.scorer
        self.trainer.engine, source.scorer = self._sample, self._score

    def start(self) -> None:
        """Before a step."""
        self.seconds.clear()
        self._since = now()

    def stop(self) -> None:
        """After a step: what is not sampling, reading or scoring is the update."""
        self._end("update")

    def _end(self, phase: str) -> None:
        at = now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + at - self._since
        self._since = at

    def _sample(self, *arguments: Any) -> Sampled:
        sampled = self._engine(*arguments)
        self._end("sampling")
        return sampled

    def _score(self, answers: Answers) -> Scored:
        self._end("reading")
        scored = self._scorer(answers)
        self._end("scoring")
        self.answers = answers
        return scored


def now() -> float:
    """Seconds, when the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Tokens:
    """Tokens of a step. Prompts with several responses count once: they are computed once."""

    prompts: int
    responses: int

    @classmethod
    def of(cls, answers: Answers) -> "Tokens":
        """Those of some answers."""
        distinct = dict.fromkeys(map(tuple, answers.prompt_ids))
        return cls(sum(map(len, distinct)), sum(map(len, answers.response_ids)))

    @property
    def all(self) -> int:
        """Prompts and responses."""
        return self.prompts + self.responses


def forward_flops(model: PreTrainedModel, tokens: Tokens) -> float:
    """2·N·tokens: N without the input embedding, which multiplies nothing; the output layer works on the tokens of
    responses only. Attention is left out."""
    output = model.get_output_embeddings()
    head = 0 if output is None else output.weight.numel()
    embedding = model.get_input_embeddings().weight
    tied = output is not None and output.weight is embedding
    body = sum(parameter.numel() for parameter in model.parameters()) - head - (0 if tied else embedding.numel())
    return 2.0 * (body * tokens.all + head * tokens.responses)


def phase_flops(trainer: PPOTrainer, reward: PreTrainedModel, tokens: Tokens) -> dict[str, float]:
    """Operations of each phase. A trained token costs three forward passes (6·N), two with LoRA, whose frozen weights
    get no gradient; recomputed activations are not counted. The update ends with a forward pass of the policy."""
    policy = forward_flops(trainer.models.policy, tokens)
    critic = 0.0 if trainer.models.critic is None else forward_flops(trainer.models.critic, tokens)
    passes = trainer.config.ppo_epochs * (3 if trainer.config.lora is None else 2)
    return {
        "sampling": policy,
        "reading": 2 * policy + critic,
        "scoring": forward_flops(reward, tokens),
        "update": passes * (policy + critic) + policy,
    }


def phases_of(
    trainer: PPOTrainer, reward: PreTrainedModel, clock: Clock, peak: float | None
) -> dict[str, dict[str, float | None]]:
    """Seconds, tokens per second, and share of `peak` (operations per second; None: not shown) of each phase.
    Sampling counts the tokens of responses, the update every token once an epoch."""
    if clock.answers is None:
        raise RuntimeError("the step scored nothing")
    tokens = Tokens.of(clock.answers)
    counts = dict.fromkeys(clock.seconds, tokens.all) | {"sampling": tokens.responses}
    counts["update"] *= trainer.config.ppo_epochs
    flops = phase_flops(trainer, reward, tokens)
    return {
        phase: {
            "seconds": seconds,
            "tokens_per_s": counts[phase] / seconds,
            "flops": flops[phase],
            "share_of_peak": peak and flops[phase] / seconds / peak,
        }
        for phase, seconds in clock.seconds.items()
    }


def peak_flops(name: str, precision: str) -> float | None:
    """The peak of the GPU of this name in bfloat16; None in another precision and for a GPU that is not in the
    table."""
    found = (peak for part, peak in PEAK_FLOPS.items() if part in name)
    return next(found, None) if precision == "bfloat16" else None
