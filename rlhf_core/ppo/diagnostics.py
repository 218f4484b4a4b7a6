"""The diagnostics of a PPO step as one row of numbers. No statistic includes padding (rule 18)."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.scorer import correlation
from rlhf_core.models.ensemble import JUDGE
from rlhf_core.models.masked import masked_mean
from rlhf_core.ppo.advantages import reward_to_go
from rlhf_core.ppo.kl import estimate_kl
from rlhf_core.ppo.plan import StepPlan
from rlhf_core.ppo.rollout import Credit, Rollout, Scores
from rlhf_core.ppo.statistics import UpdateStatistics, explained_variance

NGRAM = 3
CRITIC_COLUMNS = ("explained_variance", "value_loss", "value_clip_fraction", "grad_norm_critic")
"""Empty in a run without a critic."""
UPDATE_COLUMNS = (
    "policy_loss", "value_loss", "clip_fraction", "value_clip_fraction", "approx_kl", "clip_fraction_last_epoch",
)  # fmt: skip
"""Empty for a step that trained on no answer; so is `kl_loss`."""


def step_row(
    config: PPOConfig,
    plan: StepPlan,
    rollout: Rollout,
    scores: Scores,
    credit: Credit,
    statistics: UpdateStatistics,
    learning_rate: float,
    kl_coef: float,
) -> dict[str, float | None]:
    """The diagnostics of one step (counted from 1). KL in nats per sequence, `kl_moving` to where a moving reference
    is and the others to its start; entropy of the policy that sampled in nats per token, lengths in tokens."""
    real = rollout.mask.bool()
    lengths = rollout.lengths
    row: dict[str, float | None] = {
        "step": plan.step + 1,
        "reward_raw": scores.raw.mean().item(),
        "score": scores.used.mean().item(),
        "reward_shaped": credit.rewards.sum(dim=1).mean().item(),
        "gold": sum(scores.gold) / len(scores.gold) if scores.gold is not None else None,
        "kl": (rollout.ref_kl if rollout.fixed_kl is None else rollout.fixed_kl).sum(dim=1).mean().item(),
        "kl_k1": _per_sequence(rollout, "k1"),
        "kl_k2": _per_sequence(rollout, "k2"),
        "kl_k3": _per_sequence(rollout, "k3"),
        "entropy": masked_mean(rollout.old_entropy, rollout.mask).item(),
        "advantage_abs": masked_mean(credit.advantages.abs(), rollout.mask).item(),
        "explained_variance": explained_variance(
            rollout.old_values, reward_to_go(credit.rewards, rollout.mask), rollout.mask
        ).item(),
        "response_tokens_mean": sum(lengths) / len(lengths),
        "response_tokens_max": max(lengths),
        "missing_eos_share": 1.0 - rollout.ended.float().mean().item(),
        "kl_coef": kl_coef,
        "learning_rate": learning_rate,
        "engine_mismatch_max": (rollout.engine_logprobs - rollout.old_logprobs)[real].abs().max().item(),
        "engine_mismatch_k3": masked_mean(
            estimate_kl(rollout.engine_logprobs, rollout.old_logprobs, "k3"), rollout.mask
        ).item(),
        "min_token_reward": credit.rewards[real].min().item(),
        "repeated_ngram_share": repeated_ngram_share(rollout.response_ids),
        "repeating_answer_share": repeating_answer_share(rollout.response_ids),
    }
    row |= {"kl_moving": rollout.ref_kl.sum(dim=1).mean().item()} if rollout.fixed_kl is not None else {}
    parts: dict[str, float | None] = {f"reward/{name}": sum(part) / len(part) for name, part in scores.parts.items()}
    if JUDGE in scores.parts:
        parts["judge_correlation"] = correlation(scores.raw.tolist(), scores.parts[JUDGE])
    row = {**statistics.means(), **row, **parts, **credit.equal_groups}
    row |= {} if config.has_critic else dict.fromkeys(CRITIC_COLUMNS)
    row |= {"ptx_loss": row.get("ptx_loss")} if config.ptx.coef else {}  # not measured in the warm-up
    row |= {} if plan.trains_policy else {"grad_clipped_share": None}
    if not statistics.tokens:  # every answer was left out
        row |= dict.fromkeys([*UPDATE_COLUMNS, *(["kl_loss"] if config.kl.penalty == "loss" else [])])
    return row


def _per_sequence(rollout: Rollout, kind: str) -> float:
    reference = rollout.ref_logprobs if rollout.fixed_logprobs is None else rollout.fixed_logprobs
    per_token = estimate_kl(rollout.old_logprobs, reference, kind, rollout.mask)  # type: ignore[arg-type]
    return torch.where(rollout.mask.bool(), per_token, 0.0).sum(dim=1).mean().item()


def repeated_ngram_share(responses: Sequence[Sequence[int]], n: int = NGRAM) -> float:
    """Share of n-grams of tokens that already occurred in the same response."""
    total = repeated = 0
    for response in responses:
        ngrams = [tuple(response[i : i + n]) for i in range(len(response) - n + 1)]
        total += len(ngrams)
        repeated += len(ngrams) - len(set(ngrams))
    return repeated / total if total else 0.0


def repeating_answer_share(responses: Sequence[Sequence[int]]) -> float:
    """Share of responses in which two tokens in a row occur again."""
    repeats = [len(set(pairs)) < len(pairs) for pairs in (list(pairwise(response)) for response in responses)]
    return sum(repeats) / len(repeats)
