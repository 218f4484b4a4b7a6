"""The stages of a run that compute with a model: their memory, and the tokens that they process."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.config.dpo import PairConfig
from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.config.sft import SFTConfig
from rlhf_core.planning.memory import (
    Lengths,
    Phase,
    evaluate_phases,
    pair_phases,
    ppo_phases,
    reward_phases,
    sampler_phases,
    sft_phases,
)  # fmt: skip
from rlhf_core.planning.shapes import Shapes
from tasks.params.methods import BY_NAME, VARIANTS
from tasks.params.scorer import uses_reward_model

SAMPLED = ("judge", "model", "both")
"""Sources of preferences that sample answers."""
FOR_OPTIMUM = 8
"""Answers of the SFT model, and of the policy, to each prompt from which `evaluate` estimates the optimum."""


@dataclass(frozen=True)
class Work:
    """Tokens that a stage processes, each times the models that process it. At most: every row has its longest
    length."""

    samples: int = 0
    sampled: int = 0
    read: int = 0
    trained: int = 0


@dataclass(frozen=True)
class PlannedStage:
    """A stage, how to plan its memory, and its work; None where it depends on the number of rows of data that are not
    here yet."""

    name: str
    phases: Callable[[Shapes], list[Phase]]
    work: Work | None


def stages_of(params: Any, root: Path, prompt_tokens: int | None = None) -> Iterator[PlannedStage]:
    """The stages of valid parameters that compute with a model, in the order of the graph."""
    for stage in _stages_of(params, root, prompt_tokens):
        yield replace(stage, phases=partial(_phases, stage, params.precision))


def _phases(stage: PlannedStage, precision: Precision, shapes: Shapes) -> list[Phase]:
    return stage.phases(shapes.in_precision(precision))


def _stages_of(params: Any, root: Path, prompt_tokens: int | None) -> Iterator[PlannedStage]:
    prompt = prompt_tokens or longest_prompt(params)
    yield _sft("sft", params.sft, prompt, rows_in(root, "demonstrations"))
    judged = params.preferences
    answers = judged.samples_per_prompt if judged.source in SAMPLED else 2
    learns = uses_reward_model(params.scorer)
    if learns and judged.source in SAMPLED:
        lengths = Lengths(prompt, judged.max_new_tokens)
        yield _sampling("preferences", judged.batch_size, lengths, answers, rows_in(root, "preference_prompts"))
    pairs = rows_in(root, "pairs")
    if learns:
        yield _pairs("reward", params.reward, prompt, answers, pairs)
    scorers = (params.reward.members + (params.reward.judge_share > 0)) if learns else 0
    yield _loop("ppo", params.ppo, prompt, scorers, params.reward.lora)
    for name, method in params.enabled_methods():
        if name in VARIANTS:
            yield _loop(name, method.applied_to(params.ppo, name), prompt, scorers, params.reward.lora)
        elif isinstance(method, PairConfig):
            yield _pairs(name, method, prompt, answers, pairs)
        elif name == "rejection_sft":
            yield _sft(name, method.training, prompt, None)
    yield _evaluate(params, prompt, rows_in(root, "heldout"), scorers)


def candidates_of(params: Any) -> tuple[int, int]:
    """Models that `evaluate` samples from, at most: those that answer with each of its seeds (SFT model, policy,
    methods, the user's), and those that answer with the first one (interpolated policies, PPO's snapshots)."""
    ppo, settings = params.ppo, params.evaluate
    methods = sum(BY_NAME[name].has_model for name, _ in params.enabled_methods())
    snapshots = math.ceil(ppo.steps / (ppo.snapshot_every or ppo.steps))
    others = len(settings.interpolation) + min(settings.snapshots, snapshots)
    return 2 + methods + len(settings.extra_models), others


def _evaluate(params: Any, prompt: int, heldout: int | None, scorers: int) -> PlannedStage:
    """The work counts the answers of every candidate, and those of SFT model and policy for the optimum."""
    settings = params.evaluate
    lengths, seeds = Lengths(prompt, settings.max_new_tokens), len(settings.seeds)
    with_seeds, once = candidates_of(params)
    more = 2 * max(0, FOR_OPTIMUM - seeds)
    prompts = min(settings.max_prompts, heldout or settings.max_prompts)
    samples = prompts * (with_seeds * seeds + once + more)
    tokens = samples * lengths.whole
    work = Work(samples, samples * lengths.response, tokens * (2 + scorers))
    size, between = settings.batch_size, bool(settings.interpolation)
    return PlannedStage(
        "evaluate", lambda shapes: evaluate_phases(shapes, size, lengths, seeds, scorers, between), work
    )


def longest_prompt(params: Any) -> int:
    """Tokens of a prompt that leaves the reward model room for an answer."""
    return max(1, int(params.reward.max_tokens) - int(params.preferences.max_new_tokens))


def rows_in(root: Path, name: str) -> int | None:
    """The rows of a dataset of `ingest`; None before it was made."""
    path = root / "data" / "ingest" / f"{name}.jsonl"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _within(prompt: int, longest: int) -> Lengths:
    prompt = min(prompt, longest - 1)
    return Lengths(prompt, longest - prompt)


def _sft(name: str, config: SFTConfig, prompt: int, rows: int | None) -> PlannedStage:
    lengths = _within(prompt, config.max_tokens)
    work = None if rows is None else Work(trained=round(rows * config.epochs) * lengths.whole)
    return PlannedStage(name, lambda shapes: sft_phases(shapes, config, lengths), work)


def _pairs(name: str, config: Any, prompt: int, answers: int, rows: int | None) -> PlannedStage:
    lengths, is_policy = _within(prompt, config.max_tokens), isinstance(config, PairConfig)
    tokens = None if rows is None else rows * 2 * lengths.whole
    times = round(config.epochs * getattr(config, "members", 1))
    work = None if tokens is None else Work(trained=times * tokens, read=tokens * is_policy)
    plan = pair_phases if is_policy else reward_phases
    return PlannedStage(name, lambda shapes: plan(shapes, config, lengths, answers), work)


def _loop(name: str, config: PPOConfig, prompt: int, scorers: int, reward_lora: LoraSettings | None) -> PlannedStage:
    lengths = Lengths(prompt, config.max_new_tokens)
    samples = config.steps * config.batch_size
    tokens, critic = samples * lengths.whole, int(config.needs_critic_model)
    work = Work(
        samples=samples,
        sampled=samples * lengths.response,
        read=tokens * (3 + critic + scorers),
        trained=tokens * config.ppo_epochs * (1 + critic),
    )
    return PlannedStage(name, lambda shapes: ppo_phases(shapes, config, lengths, scorers, reward_lora), work)


def _sampling(name: str, rows: int, lengths: Lengths, each: int, prompts: int | None) -> PlannedStage:
    samples = None if prompts is None else prompts * each
    work = None if samples is None else Work(samples, samples * lengths.response)
    return PlannedStage(name, lambda shapes: sampler_phases(shapes, rows, lengths, each), work)
