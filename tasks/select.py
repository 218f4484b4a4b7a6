"""Stage `select`: chooses what becomes models/policy, one of PPO's snapshots or an interpolation of the last one, by
scores and KL on validation prompts."""

import copy
from dataclasses import replace
from statistics import stdev
from typing import Any

from transformers import PreTrainedModel

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.tokenizer import stop_ids
from rlhf_core.errors import UserError
from rlhf_core.models.hf import copy_weights, default_device, load_causal_lm, place, save_checkpoint, write_ends
from rlhf_core.models.interpolation import interpolate
from rlhf_core.ppo import snapshots
from tasks.datasets.jsonl import Row
from tasks.evaluation.evaluator import CandidateModel, Evaluator, ScoredAnswers, build_evaluator, load_candidate
from tasks.params.judge import LANGUAGE_MODELS, SCORING, JudgeParams
from tasks.params.scorer import functions
from tasks.params.select import SelectParams
from tasks.stage import rounds
from tasks.stage.models import load_frozen, set_numerics
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.training.gold_judge import judge_of
from tasks.training.scorer import terms_of

PREFERENCES = "data/preferences/preferences.jsonl"
PROMPTS = "data/ingest/preference_prompts.jsonl"
SFT, SNAPSHOTS = rounds.SFT, "models/snapshots"
ONE_SIDED = 1.645
"""Standard errors of a one-sided 95% margin."""


def execute(stage: Stage[SelectParams]) -> None:
    """Make models/policy, plots/select.csv and metrics/select.json."""
    set_numerics(stage)
    config, params = stage.block("ppo", PPOConfig), stage.params
    sft = load_candidate(stage, "sft", stage.root / SFT)
    table = compare(stage, config, sft) if params.prompts else unknown(stage)
    kind = stage.block("judge", JudgeParams).kind
    judged = judging_column(kind, kind in SCORING or judge_of(stage) is not None)
    chosen = choose(table, params.rule, judged, params.kl_budget)
    save_policy(stage, config, sft, chosen)
    stage.outputs.write_csv("plots/select.csv", table)
    own = [row for row in table if row["eta"] in (0.0, 1.0)]
    stage.write_metrics(
        {
            "rule": params.rule,
            "step": chosen["step"],
            "eta": chosen["eta"],
            "kl": chosen["kl"],
            "kl_budget": params.kl_budget,
            "last_step": own[-1]["step"],
            "best_judge_step": best_step(own, judged),
            "best_proxy_step": best_step(own, "reward"),
            "prompts": table[0]["prompts"],
        }
    )


def compare(stage: Stage[SelectParams], config: PPOConfig, sft: CandidateModel) -> list[Row]:
    """One row for each snapshot and for each interpolation of the last one; the SFT model is step 0 with η = 0."""
    rows = validation_prompts(stage)[: stage.params.prompts]
    source = f"{prompts_path(stage)}, distinct validation prompts"
    # `purpose`: other random numbers than in `evaluate`
    evaluator, _ = build_evaluator(
        *(stage, source, rows, sft, config, judge_of(stage)),
        purpose="select ",
        max_prompt_tokens=config.max_prompt_tokens,  # the policy is chosen by prompts as it was trained on
    )
    steps = snapshots.steps_in(stage.root / SNAPSHOTS)
    count = (1 + len(steps) + len(stage.params.interpolation)) * len(evaluator.rows)
    evaluator = replace(evaluator, progress=stage.progress(count, "answer"))
    (start,) = evaluator.answer(sft, [stage.seed])
    table = [summarise(evaluator, start, 0, 0.0, start)]
    policy = None
    for step in steps:
        policy = policy_at(stage, sft, step, policy)
        (scored,) = evaluator.answer(policy, [stage.seed])
        table.append(summarise(evaluator, start, step, 1.0, scored))
    for eta in stage.params.interpolation:  # of the last snapshot
        assert policy is not None  # PPO's last step has a snapshot
        (scored,) = evaluator.answer(interpolated(sft, policy, eta), [stage.seed])
        table.append(summarise(evaluator, start, step, eta, scored))
    return sorted(table, key=lambda row: (row["step"], row["eta"]))


def validation_prompts(stage: Stage[SelectParams]) -> list[Row]:
    """The distinct validation prompts. Raises UserError where there is none."""
    path = prompts_path(stage)
    rows = [row for row in stage.read(path) if row["split"] == "validation"]
    if not rows:
        raise UserError(f"{path}: no validation prompts; raise ingest.split.preferences, or set select.prompts: 0")
    return list({row["prompt_id"]: row for row in rows}.values())


def prompts_path(stage: Stage[SelectParams]) -> str:
    """The pairs; or the prompts of the preference data, where there are no pairs, and where functions score or judge,
    which may read further columns of the data."""
    reads_columns = functions(terms_of(stage)) or stage.block("judge", JudgeParams).function
    return PROMPTS if reads_columns or not stage.read(PREFERENCES) else PREFERENCES


def policy_at(
    stage: Stage[Any], sft: CandidateModel, step: int, before: CandidateModel | None = None
) -> CandidateModel:
    """The policy after a step, in the run's precision: the weights of its snapshot in a copy of the model that PPO
    began with. The policy of a step before it is overwritten: each snapshot is read into the same memory."""
    start, folder = rounds.start_of(stage.root), stage.root / SNAPSHOTS
    if before is None:
        model = copy.deepcopy(sft.model) if start == SFT else load_frozen(stage, stage.root / start)
    else:
        model = before.model
    if not snapshots.are_adapters(folder):
        snapshots.load(folder, step, model)
    elif stage.precision != "float32":  # rounded once, after the merge, as the saved policy is when it is loaded
        copy_weights(snapshots.load(folder, step, exact_start(stage)), model)
    else:
        if before is not None:  # its adapters were merged into the weights
            copy_weights(sft.model if start == SFT else load_frozen(stage, stage.root / start), model)
        snapshots.load(folder, step, model)
    return CandidateModel(f"step-{step}", place(model), sft.tokenizer, "policy")


def exact_start(stage: Stage[Any]) -> PreTrainedModel:
    """The model that PPO began with, on the CPU, for `snapshots.load`: in float32, or in the 4 bits below its
    adapters."""
    folder, frozen = stage.root / rounds.start_of(stage.root), snapshots.start_precision(stage.root / SNAPSHOTS)
    device = default_device() if frozen == "nf4" else None  # where PPO rounded it to 4 bits
    trusted = trusts(stage)
    return load_causal_lm(folder, trust_remote_code=trusted, frozen=frozen, device=device, log=stage.log).cpu()


def interpolated(sft: CandidateModel, policy: CandidateModel, eta: float) -> CandidateModel:
    """The weights SFT + η·(policy − SFT); it shares its random numbers with the snapshots."""
    model = place(interpolate(sft.model, policy.model, eta))
    return CandidateModel(f"{policy.name}-eta-{eta:g}", model, sft.tokenizer, "policy")


def summarise(evaluator: Evaluator, start: ScoredAnswers, step: int, eta: float, scored: ScoredAnswers) -> Row:
    """Means over the prompts; the KL is exact, in nats per answer, and the win rate is against the SFT model."""
    assert scored.divergence is not None  # snapshots have the SFT model's tokenizer
    return {
        "step": step,
        "eta": eta,
        "kl": _mean(scored.divergence.kl),
        "kl_standard_error": standard_error(scored.divergence.kl),
        "reward": _mean(scored.rewards),
        "gold": None if scored.gold is None else _mean(scored.gold),
        "win_rate": _mean(evaluator.compare(scored, start)),
        "prompts": len(evaluator.rows),
    }


def unknown(stage: Stage[SelectParams]) -> list[Row]:
    """The table without figures, for `select.prompts: 0`."""
    columns = ("kl", "kl_standard_error", "reward", "gold", "win_rate")
    steps = snapshots.steps_in(stage.root / SNAPSHOTS)
    return [{"step": step, "eta": 1.0, **dict.fromkeys(columns), "prompts": 0} for step in steps]


def judging_column(kind: str, has_gold: bool) -> str | None:
    """The column with the judge's score: a language model (`judge.kind`) gives win rates, the data's own judge, a
    function and a reward model a gold score. None without a judge besides the reward model."""
    if kind in LANGUAGE_MODELS:
        return "win_rate"
    return "gold" if has_gold else None


def choose(table: list[Row], rule: str, judged: str | None, budget: float | None = None) -> Row:
    """The row of the candidate that the rule chooses among those within the KL budget, the first of equal ones.

    `last`: the last snapshot; with a budget the latest step within it, and of this step the largest η. Raises UserError
    if the rule needs a judge and there is none, and if no candidate is within the budget.
    """
    taken = [row for row in table if row["step"] > 0]
    if budget is not None:
        taken = within(taken, budget)
    elif rule == "last":
        taken = [row for row in taken if row["eta"] == 1.0]
    if rule == "last":
        return max(taken, key=lambda row: (row["step"], row["eta"]))
    column = {"best_judge": judged, "best_proxy": "reward"}[rule]
    if column is None or any(row.get(column) is None for row in taken):
        raise UserError(f"select.rule is {rule}, but there is no judge besides the reward model; use best_proxy")
    return max(taken, key=lambda row: float(row[column]))


def within(table: list[Row], budget: float) -> list[Row]:
    """The candidates whose KL plus its margin is at most the budget (nats per answer). Raises UserError if none is."""
    found = [row for row in table if upper_kl(row) <= budget]
    if found:
        return found
    least = min(table, key=upper_kl)
    below = f" at step {least['step']}" + (f" with eta {least['eta']:g}" if least["eta"] < 1 else "")
    raise UserError(
        f"select.kl_budget is {budget:g} nats, and no candidate is within it: the smallest KL is {least['kl']:.3g} "
        f"({upper_kl(least):.3g} with its margin){below}; raise kl_budget, or add a smaller eta to select.interpolation"
    )


def upper_kl(row: Row) -> float:
    """The KL plus a one-sided 95% margin for its error over prompts, so that other prompts keep a budget, too."""
    return float(row["kl"] + ONE_SIDED * row["kl_standard_error"])


def standard_error(values: list[float]) -> float:
    """Of the mean over prompts; 0 for one prompt, which shows no variation."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def best_step(table: list[Row], column: str | None) -> int | None:
    """The step with the highest figure, 0 for the SFT model; None if the figure is unknown."""
    known = [row for row in table if row.get(column or "") is not None]
    return int(max(known, key=lambda row: float(row[str(column)]))["step"]) if known else None


def save_policy(stage: Stage[SelectParams], config: PPOConfig, sft: CandidateModel, chosen: Row) -> None:
    """Save the chosen candidate as models/policy, in float32, with the stop tokens in its generation config."""
    policy = snapshots.load(stage.root / SNAPSHOTS, chosen["step"], exact_start(stage))
    if chosen["eta"] < 1:
        below = sft.model
        if stage.precision != "float32":  # `sft` has rounded weights
            below = place(load_causal_lm(stage.root / SFT, trust_remote_code=trusts(stage), log=stage.log))
        policy = interpolate(below, place(policy, below.device), chosen["eta"])
    if config.stop_tokens:
        write_ends(policy, sft.tokenizer, stop_ids(sft.tokenizer, policy, config.stop_tokens))
    save_checkpoint(stage.out("models/policy"), policy, sft.tokenizer)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
