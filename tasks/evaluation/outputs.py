"""The outputs of `evaluate`: metrics/evaluate.json and the rows of data/evaluate/."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.evaluation.best_of_n import best_of_n_kl
from rlhf_core.evaluation.intervals import bounds
from rlhf_core.models.scorers import REWARD_MODEL_NAME
from tasks.datasets.jsonl import Row
from tasks.evaluation.ceiling import Ceiling
from tasks.evaluation.evaluator import Evaluator
from tasks.evaluation.results import (
    Bootstrap,
    Results,
    difference,
    own_figures,
    pick,
    rates_by_reward_models,
    win_rate_figures,
    wins_over,
    with_interval,
)
from tasks.evaluation.teacher_forced import Demonstrated, demonstration_figures
from tasks.params.evaluate import EvaluateParams
from tasks.params.methods import BY_NAME
from tasks.stage.stage import Stage

BY_REWARD_MODELS = ("win_rate_by_", "win_rate_controlled_by_")
"""Beginnings of the names of win rates by reward models."""


@dataclass
class Answered:
    """All models' answers, and what they lose on demonstrations."""

    results: dict[str, Results] = field(default_factory=dict)
    """By name, in the order of the table."""
    demonstrated: dict[str, Demonstrated] = field(default_factory=dict)
    """By name; none for best-of-n."""
    snapshots: dict[int, Results] = field(default_factory=dict)
    """By step; first sampling seed only, except for the snapshot that is the policy."""
    interpolated: dict[float, Results] = field(default_factory=dict)
    """Between SFT model and policy, by η; first sampling seed only."""
    ceiling: Ceiling | None = None
    """The optimum against the reward model; None where `evaluate.optimum_samples` is 0."""


def model_figures(
    stage: Stage[EvaluateParams], evaluator: Evaluator, answered: Answered, name: str, bootstrap: Bootstrap
) -> dict[str, Any]:
    """All figures of one model, with the same keys for every model; None where a figure does not apply."""
    results, sft, policy = (answered.results[other] for other in (name, "sft", "policy"))
    over_sft = None if name == "sft" else wins_over(evaluator, results, sft)
    over_policy = None if name == "policy" else wins_over(evaluator, results, policy)
    figures = own_figures(results, bootstrap) | win_rate_figures(results, sft, over_sft, bootstrap)
    figures |= rates_by_reward_models(evaluator, results, sft, bootstrap)
    figures |= with_interval("win_rate_vs_policy", bootstrap.of(results, over_policy))
    ahead = None if name == "policy" else difference(results, policy, "gold", bootstrap)
    figures |= with_interval("gold_minus_policy", ahead)
    if name not in answered.demonstrated:
        bound = best_of_n_kl(results.best_of)
        figures |= {"kl": bound, **bounds("kl", None)}
    figures |= demonstration_figures(answered.demonstrated.get(name), answered.demonstrated["sft"], bootstrap)
    return figures | costs(stage, name, results)


def costs(stage: Stage[EvaluateParams], name: str, results: Results) -> dict[str, Any]:
    """The cost of a model beyond SFT model, preference data and reward model: answers sampled and response tokens read
    in its training, and samples for each answer. The policy's cost is that of PPO's whole run. Also the recipe of a
    method that has several, and `base` for an SFT model that is the base model."""
    method = BY_NAME.get(name)
    parts: list[dict[str, Any]] = [{}]
    if method or name == "policy":
        paid = [*method.built_on, name] if method else ["ppo"]
        parts = [stage.read_json(f"metrics/{part}.json") for part in paid]
        trained = {cost: sum(part[cost] for part in parts) for cost in ("samples_generated", "tokens_trained")}
    else:
        is_unknown = name in stage.params.extra_models or name.startswith("round_")
        trained = dict.fromkeys(("samples_generated", "tokens_trained"), None if is_unknown else 0)
        if name == "sft" and stage.read_json("metrics/sft.json").get("enabled") is False:
            parts = [{"recipe": "base"}]
    return {**trained, "samples_per_answer": results.best_of, "recipe": parts[-1].get("recipe")}


def summary(evaluator: Evaluator, models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The main figures of SFT model and policy, the judge of the win rate, and the scorer where it is not the reward
    model alone."""
    sft, policy = models["sft"], models["policy"]
    scorer = {} if evaluator.scorer.name == REWARD_MODEL_NAME else {"scorer": evaluator.scorer.name}
    top: dict[str, Any] = {
        "judge": evaluator.judge.name if evaluator.judge else None,
        "win_rate_judge": evaluator.winner_named_by,
        "judged_by": evaluator.judged_by,
        **scorer,
        "prompts": len(evaluator.rows),
        **{name: policy[name] for name in ("win_rate", "win_rate_low", "win_rate_high")},
        "ties": policy["ties"],
        **{name: value for name, value in policy.items() if name.startswith(BY_REWARD_MODELS)},
        "kl_per_sequence": policy["kl"],
        "missing_eos_share": policy["missing_eos_share"],
        "missing_eos_share_sft": sft["missing_eos_share"],
    }
    for name, model in (("sft", sft), ("policy", policy)):
        keys = ("gold", "reward", "response_tokens", "distinct_2", "heldout_loss")
        top |= {f"{key}_{name}": model[key] for key in keys}
        top |= {f"gold_{name}{end}": model[f"gold{end}"] for end in ("_low", "_high")}
    return {**top, "alignment_tax": policy["alignment_tax"]}


def sample_rows(evaluator: Evaluator, results: dict[str, Results]) -> list[Row]:
    """One row for each prompt with the first answers of SFT model and policy."""
    sft, policy = results["sft"].columns[0], results["policy"].columns[0]
    assert policy.divergence is not None  # the policy has the SFT model's tokenizer
    return [
        {
            "prompt_id": row["prompt_id"],
            "prompt": row["prompt"],
            "sft": sft.texts[i],
            "policy": policy.texts[i],
            "sft_ended": sft.ended[i],
            "policy_ended": policy.ended[i],
            "gold_sft": None if sft.gold is None else sft.gold[i],
            "gold_policy": None if policy.gold is None else policy.gold[i],
            "reward_sft": sft.rewards[i],
            "reward_policy": policy.rewards[i],
            "kl": policy.divergence.kl[i],
            "sft_tokens": sft.tokens[i],
            "policy_tokens": policy.tokens[i],
        }
        for i, row in enumerate(evaluator.rows)
    ]


def answer_rows(stage: Stage[EvaluateParams], evaluator: Evaluator, results: dict[str, Results]) -> Iterator[Row]:
    """One row for each answer; of best-of-n the best of the first n samples."""
    for name, of_model in results.items():
        picks = name.startswith("best_of_")
        columns = [pick(of_model.columns[: of_model.best_of])] if picks else of_model.columns
        for seed, scored in zip(stage.params.seeds, columns, strict=False):
            for i, row in enumerate(evaluator.rows):
                yield {
                    "model": name,
                    "seed": None if picks else seed,
                    "prompt_id": row["prompt_id"],
                    "prompt": row["prompt"],
                    "response": scored.texts[i],
                    "ended": scored.ended[i],
                    "tokens": scored.tokens[i],
                    "reward": scored.rewards[i],
                    "gold": None if scored.gold is None else scored.gold[i],
                    "kl": None if scored.divergence is None else scored.divergence.kl[i],
                }
