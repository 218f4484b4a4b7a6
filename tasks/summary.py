"""The figures by which people compare runs, for DVC, MLflow, Prefect and tables: metrics/summary.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUMMARY = "metrics/summary.json"
FIGURES = {
    "gold_sft": "gold score of SFT",
    "gold_policy": "gold score of the policy",
    "gold_policy_low": "gold score of the policy, lower end of its 95% interval",
    "gold_policy_high": "gold score of the policy, upper end of its 95% interval",
    "win_rate": "win rate of the policy against SFT",
    "win_rate_low": "win rate, lower end of its 95% interval",
    "win_rate_high": "win rate, upper end of its 95% interval",
    "win_rate_by_reward_model": "win rate by the reward model that PPO maximised",
    "win_rate_by_judging_model": "win rate by the judging reward model",
    "kl_per_sequence": "exact KL to the reference (nats per answer)",
    "reward_sft": "reward model's score of SFT",
    "reward_policy": "reward model's score of the policy",
    "reward_accuracy": "held-out pairs that the reward model ranks correctly (share)",
    "response_tokens_policy": "length of the policy's answers (tokens)",
    "missing_eos_share": "share of answers without an end token",
    "alignment_tax": "alignment tax (nats per token)",
    "alerts": "PPO's health alerts",
}
"""Name -> label with its unit, in the order of tables."""

BASELINES = {"length": "the longer answer", "words": "a bag of words"}
"""What a reward model is compared with, by the beginning of its figures' names in metrics/reward.json."""


def summarise(evaluation: Mapping[str, Any], reward: Mapping[str, Any], ppo: Mapping[str, Any]) -> dict[str, float]:
    """The figures of metrics/{evaluate,reward,ppo}.json that are known."""
    found = {**evaluation, "reward_accuracy": reward.get("heldout_accuracy"), "alerts": len(ppo.get("alerts") or [])}
    return {name: found[name] for name in FIGURES if found.get(name) is not None}


def not_better_than(reward: Mapping[str, Any]) -> str | None:
    """What the reward model of metrics/reward.json is not shown to be better than on held-out pairs, by 95% intervals:
    chance, or the better one of two baselines that cost nothing. None where it is, or where that is unknown."""
    low = reward.get("heldout_accuracy_low")
    if low is not None and low <= 0.5:
        return "chance"
    known = [name for name in BASELINES if reward.get(f"ahead_of_{name}_low") is not None]
    best = max(known, key=lambda name: float(reward[f"{name}_accuracy"]), default=None)
    return BASELINES[best] if best is not None and reward[f"ahead_of_{best}_low"] <= 0 else None


def read(root: Path) -> dict[str, float]:
    """The figures of the run in `root`; empty before its evaluation. Raises ValueError for a file that is no JSON."""
    path = root / SUMMARY
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found
