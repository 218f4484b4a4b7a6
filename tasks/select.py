"""Stage `select`: chooses the PPO snapshot that becomes models/policy, by its scores on validation prompts."""

import copy
from typing import Any

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.tokenizer import stop_ids
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.models.hf import load_causal_lm, place, save_checkpoint
from rlhf_core.ppo import snapshots
from tasks.datasets.jsonl import Row
from tasks.evaluation.evaluator import CandidateModel, Evaluator, ScoredAnswers, build_evaluator, load_candidate
from tasks.params.judge import JudgeParams
from tasks.params.select import SelectParams
from tasks.stage.run import run
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.training.gold_judge import judge_of

PREFERENCES = "data/preferences/preferences.jsonl"
SFT, SNAPSHOTS = "models/sft", "models/snapshots"


def execute(stage: Stage[SelectParams]) -> None:
    """Make models/policy, plots/select.csv and metrics/select.json."""
    make_deterministic(stage.seed, stage.common.threads)
    config = stage.block("ppo", PPOConfig)
    sft = load_candidate(stage, "sft", stage.root / SFT)
    table = compare(stage, config, sft) if stage.params.prompts else unknown(stage)
    judged = judging_column(stage)
    step = choose(table, stage.params.rule, judged)
    save_policy(stage, config, sft, step)
    stage.outputs.write_csv("plots/select.csv", table)
    stage.write_metrics(
        {
            "rule": stage.params.rule,
            "step": step,
            "last_step": table[-1]["step"],
            "best_judge_step": best_step(table, judged),
            "best_proxy_step": best_step(table, "reward"),
            "prompts": table[0]["prompts"],
        }
    )


def compare(stage: Stage[SelectParams], config: PPOConfig, sft: CandidateModel) -> list[Row]:
    """One row for each snapshot; the SFT model is step 0."""
    rows = validation_prompts(stage)[: stage.params.prompts]
    source = f"{PREFERENCES}, distinct validation prompts"
    # `purpose`: other random numbers than in `evaluate`
    evaluator, _ = build_evaluator(stage, source, rows, sft, config, judge_of(stage), purpose="select ")
    (start,) = evaluator.answer(sft, [stage.seed])
    table = [summarise(evaluator, start, 0, start)]
    for step in snapshots.steps_in(stage.root / SNAPSHOTS):
        (scored,) = evaluator.answer(policy_at(stage, sft, step), [stage.seed])
        table.append(summarise(evaluator, start, step, scored))
    return table


def validation_prompts(stage: Stage[SelectParams]) -> list[Row]:
    """The distinct prompts of the validation pairs."""
    rows = [row for row in stage.read(PREFERENCES) if row["split"] == "validation"]
    return list({row["prompt_id"]: row for row in rows}.values())


def policy_at(stage: Stage[Any], sft: CandidateModel, step: int) -> CandidateModel:
    """The policy after a step: the weights of its snapshot in a copy of the SFT model."""
    model = snapshots.load(stage.root / SNAPSHOTS, step, copy.deepcopy(sft.model))
    return CandidateModel(f"step-{step}", place(model), sft.tokenizer, "policy")


def summarise(evaluator: Evaluator, start: ScoredAnswers, step: int, scored: ScoredAnswers) -> Row:
    """Means over the prompts; the win rate is against the SFT model."""
    assert scored.divergence is not None  # snapshots have the SFT model's tokenizer
    return {
        "step": step,
        "kl": _mean(scored.divergence.k1),
        "kl_k3": _mean(scored.divergence.k3),
        "reward": _mean(scored.rewards),
        "gold": None if scored.gold is None else _mean(scored.gold),
        "win_rate": _mean(evaluator.compare(scored, start)),
        "prompts": len(evaluator.rows),
    }


def unknown(stage: Stage[SelectParams]) -> list[Row]:
    """The table without figures, for `select.prompts: 0`."""
    columns = ("kl", "kl_k3", "reward", "gold", "win_rate")
    steps = snapshots.steps_in(stage.root / SNAPSHOTS)
    return [{"step": step, **dict.fromkeys(columns), "prompts": 0} for step in steps]


def judging_column(stage: Stage[SelectParams]) -> str | None:
    """The column with the judge's score; None without a judge besides the reward model."""
    if stage.block("judge", JudgeParams).kind == "model":
        return "win_rate"
    return None if judge_of(stage) is None else "gold"


def choose(table: list[Row], rule: str, judged: str | None) -> int:
    """The step of the snapshot that the rule chooses, the first of equal ones. Raises UserError if the rule needs a
    judge and there is none."""
    taken = [row for row in table if row["step"] > 0]
    columns = {"best_judge": judged, "best_proxy": "reward"}
    if rule == "last":
        return int(table[-1]["step"])
    step = best_step(taken, columns[rule])
    if step is None:
        raise UserError(f"select.rule is {rule}, but there is no judge besides the reward model; use best_proxy")
    return step


def best_step(table: list[Row], column: str | None) -> int | None:
    """The step with the highest figure, 0 for the SFT model; None if the figure is unknown."""
    known = [row for row in table if row.get(column or "") is not None]
    return int(max(known, key=lambda row: float(row[str(column)]))["step"]) if known else None


def save_policy(stage: Stage[SelectParams], config: PPOConfig, sft: CandidateModel, step: int) -> None:
    """Save the snapshot of `step` as models/policy, with the stop tokens in its generation config."""
    start = load_causal_lm(stage.root / SFT, trust_remote_code=trusts(stage))
    policy = snapshots.load(stage.root / SNAPSHOTS, step, start)
    if config.stop_tokens:
        policy.generation_config.eos_token_id = sorted(stop_ids(sft.tokenizer, config.stop_tokens))
    save_checkpoint(stage.out("models/policy"), policy, sft.tokenizer)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    run("select", SelectParams, execute)
