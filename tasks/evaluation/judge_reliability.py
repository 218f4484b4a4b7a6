"""Reliability of the judge (both orders of a pair) and of the reward model (agreement with the judge)."""

from typing import Any

import numpy as np

from rlhf_core.data.scorer import correlation
from rlhf_core.evaluation.agreement import agreement_at_margins, pair_agreement
from rlhf_core.evaluation.intervals import bounds
from rlhf_core.evaluation.judges import NoisyAnnotators, RubricJudge
from rlhf_core.evaluation.pair_judges import SimulatedAnnotators, both_orders
from tasks.evaluation.evaluator import Evaluator
from tasks.evaluation.results import Bootstrap, Results, Table
from tasks.params.preferences import PreferencesParams
from tasks.stage.stage import Stage


def judge_checks(stage: Stage[Any], evaluator: Evaluator, results: dict[str, Results]) -> dict[str, Any] | None:
    """Position bias and self-agreement of the judge model, or of the demo's simulated annotators with the noise of
    `preferences`. None without a judge that compares pairs."""
    judge = evaluator.pair_judge
    if judge is None and isinstance(evaluator.judge, RubricJudge):
        noise = stage.block("preferences", PreferencesParams).annotators
        judge = SimulatedAnnotators(NoisyAnnotators(evaluator.judge, noise.temperature, noise.flip_rate, stage.seed))
    if judge is None:
        return None
    policy, sft = results["policy"], results["sft"]
    found = [
        both_orders(judge, evaluator.prompts, sft.column(i).texts, scored.texts)
        for i, scored in enumerate(policy.columns)
    ]

    def mean(values: list[float]) -> float | None:
        return None if np.isnan(values).all() else float(np.nanmean(values))

    return {
        "judge": judge.name,
        "position_bias": mean([each.position_bias for each in found]),
        "self_agreement": mean([each.self_agreement for each in found]),
        "win_rate": float(np.mean([each.preference for each in found])),
        "pairs": sum(each.pairs for each in found),
        "unread": sum(sum(each.unread) for each in found),
    }


def scorer_checks(results: dict[str, Results], bootstrap: Bootstrap) -> dict[str, dict[str, Any] | None]:
    """For SFT model and policy: agreement and correlation of reward model and judge, and of SFT's answers the agreement
    reweighted to the gold margins of the policy's. None without a judge that scores."""
    found = {name: scorer_check(results[name], bootstrap) for name in ("sft", "policy")}
    if found["sft"] is not None:
        tables = [results[name].table("gold") for name in ("sft", "policy")]
        gold, like_gold = (table.tolist() for table in tables if table is not None)
        rewards, like = (rewards_of_texts(results[name]).tolist() for name in ("sft", "policy"))
        found["sft"]["agreement_at_policy_margins"] = agreement_at_margins(rewards, gold, like, like_gold)
    return found


def scorer_check(results: Results, bootstrap: Bootstrap) -> dict[str, Any] | None:
    """One model's answers; agreement needs two sampling seeds."""
    rewards, gold, tokens = rewards_of_texts(results), results.table("gold"), results.table("tokens")
    if gold is None or tokens is None:
        return None
    alike = pair_agreement(rewards.tolist(), gold.tolist(), bootstrap.resamples, bootstrap.seed)
    return {
        "agreement": None if alike is None else alike.share,
        **bounds("agreement", None if alike is None else alike.interval),
        "pairs": None if alike is None else alike.pairs,
        "correlation": correlation(rewards.ravel().tolist(), gold.ravel().tolist()),
        "length_correlation": correlation(rewards.ravel().tolist(), tokens.ravel().tolist()),
    }


def rewards_of_texts(results: Results) -> Table:
    """The reward model's scores, made equal for equal answers: other batches give other rounding errors."""
    rewards = results.table("rewards")
    assert rewards is not None
    for i, row in enumerate(rewards):
        known: dict[tuple[str, bool], float] = {}
        for k, scored in enumerate(results.columns):
            row[k] = known.setdefault(scored.as_judged(i), float(row[k]))
    return rewards
