"""Stage `evaluate`: every model of the run on the same held-out prompts: SFT model, policy, PPO's snapshots, the
alternatives that are switched on, and the user's own. How answers become figures stands in results.py, how snapshots
become a frontier in frontier.py."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rlhf_core.data.tokenizer import load_tokenizer, stop_ids
from rlhf_core.determinism import make_deterministic
from rlhf_core.errors import UserError
from rlhf_core.evaluation.best_of_n import best_of_n_kl, best_of_n_weights
from tasks.datasets.jsonl import Row
from tasks.evaluation.evaluator import (
    CandidateModel,
    Evaluator,
    ScoredAnswers,
    fitting_rows,
    load_candidate,
    load_scorer,
)
from tasks.evaluation.extra_models import EXTRA, folder_of
from tasks.evaluation.frontier import frontier_figures, frontier_rows, stopping
from tasks.evaluation.judge_reliability import judge_checks, scorer_checks
from tasks.evaluation.pair_judge import pair_judge_of
from tasks.evaluation.prompts import evaluation_prompts, source_of
from tasks.evaluation.results import Bootstrap, Results, against, difference, no_win_rate, own_figures, pick, three
from tasks.evaluation.teacher_forced import (
    TeacherForced,
    fitting_pairs,
    teacher_forced_figures,
    teacher_forced_logprobs,
)
from tasks.params.best_of_n import BestOfNParams
from tasks.params.evaluate import HELDOUT, EvaluateParams
from tasks.params.methods import BY_NAME, WITH_MODEL
from tasks.select import policies
from tasks.stage.pipeline_run import headline_numbers
from tasks.stage.run import run
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.training.gold_judge import judge_of

PREFERENCES = "data/preferences/preferences.jsonl"
BEST_OF_N = "data/best_of_n/samples.jsonl"
SELECT = "metrics/select.json"


@dataclass
class Field:
    """Everybody who took part, and what was found."""

    pairs: list[Row]
    """The validation pairs that everybody reads."""
    results: dict[str, Results] = field(default_factory=dict)
    """By name, in the order of the table."""
    read: dict[str, TeacherForced] = field(default_factory=dict)
    """What each model makes of texts that it did not write; nothing for best-of-n."""
    snapshots: dict[int, Results] = field(default_factory=dict)
    """The policy after each step that has a snapshot; the first sampling seed only."""


def execute(stage: Stage[EvaluateParams]) -> None:
    """Make data/evaluate/{samples,answers}.jsonl, metrics/evaluate.json and plots/frontier.csv."""
    make_deterministic(stage.seed, stage.common.threads)
    evaluator, too_long = make_evaluator(stage)
    bootstrap = Bootstrap(stage.params.bootstrap, stage.seed)
    everybody = answer_all(stage, evaluator)
    models = {name: row_of(stage, evaluator, everybody, name, bootstrap) for name in everybody.results}
    metrics = {
        **summary(evaluator, models),
        "prompts_too_long": too_long,
        "pairs_too_long": len(validation_pairs(stage)) - len(everybody.pairs),
        "seeds": stage.params.seeds,
        "bootstrap": stage.params.bootstrap,
        "models": models,
        **frontier_figures(evaluator, everybody.results, everybody.snapshots, models, bootstrap),
        "stopping": stopping(evaluator, everybody.results, everybody.snapshots, stage.read_json(SELECT), bootstrap),
        "judge_checks": judge_checks(stage, evaluator, everybody.results),
        "reward_model": scorer_checks(everybody.results, bootstrap),
    }
    stage.write_metrics(metrics)
    stage.outputs.write_csv(
        "plots/frontier.csv", frontier_rows(evaluator, everybody.results, everybody.snapshots, models, bootstrap)
    )
    samples = sample_rows(evaluator, everybody.results)
    stage.outputs.write_jsonl("data/evaluate/samples.jsonl", samples)
    answers = list(answer_rows(stage, evaluator, everybody.results))
    stage.outputs.write_jsonl("data/evaluate/answers.jsonl", answers)
    track(stage, metrics, samples, answers)


def make_evaluator(stage: Stage[EvaluateParams]) -> tuple[Evaluator, int]:
    """The prompts that fit with everything that is the same for all models, and how many prompts do not fit."""
    params = stage.params
    for name in params.extra_models:  # before anybody has answered
        folder = folder_of(stage, EXTRA, name, "evaluate.extra_models")
        stop_ids(load_tokenizer(folder, trust_remote_code=trusts(stage)), params.stop_tokens)
    sft = load_candidate(stage, "sft", stage.root / "models/sft")
    asked = evaluation_prompts(stage, params)
    kept, too_long = fitting_rows(stage, source_of(params), asked, sft, params.max_new_tokens)
    evaluator = Evaluator(
        stage=stage,
        rows=kept,
        reference=sft,
        scorer=load_scorer(stage, int(sft.tokenizer.pad_token_id), params.batch_size),
        judge=judge_of(stage) if params.prompts == HELDOUT else None,  # the rubric knows the demo's own prompts
        pair_judge=pair_judge_of(stage, [row["prompt"] for row in kept], params.max_new_tokens, params.batch_size),
        temperature=params.temperature,
        max_new_tokens=params.max_new_tokens,
        batch_size=params.batch_size,
        stop_tokens=params.stop_tokens,
    )
    return evaluator, too_long


def answer_all(stage: Stage[EvaluateParams], evaluator: Evaluator) -> Field:
    """All models' answers; one model in memory at a time, beside the SFT model."""
    everybody = Field(fitting_pairs(evaluator, validation_pairs(stage)))
    for candidate in candidate_models(stage, evaluator):
        columns = [evaluator.answer(candidate, seed) for seed in stage.params.seeds]
        everybody.results[candidate.name] = Results.of(columns)
        everybody.read[candidate.name] = teacher_forced_logprobs(evaluator, candidate, everybody.pairs)
        if candidate.name == "policy":
            everybody.results |= best_of_n(stage, evaluator)
        del candidate  # the next one is loaded into its place
    for step, policy in policies(stage, evaluator.reference):
        everybody.snapshots[step] = Results.of([evaluator.answer(policy, stage.params.seeds[0])])
    return everybody


def candidate_models(stage: Stage[EvaluateParams], evaluator: Evaluator) -> Iterator[CandidateModel]:
    """SFT model, policy, the alternatives that are switched on, the user's models."""
    yield evaluator.reference
    yield load_candidate(stage, "policy", stage.root / "models/policy")
    for method in WITH_MODEL:
        if (stage.root / "models" / method.name / "config.json").is_file():
            yield load_candidate(stage, method.name, stage.root / "models" / method.name)
    for name in stage.params.extra_models:
        yield load_candidate(stage, name, folder_of(stage, EXTRA, name, "evaluate.extra_models"))


def best_of_n(stage: Stage[EvaluateParams], evaluator: Evaluator) -> dict[str, Results]:
    """The samples of the stage `best_of_n`, once for each n, with the weights of its estimator."""
    samples: dict[str, list[Row]] = {}
    for row in stage.read(BEST_OF_N):
        samples.setdefault(row["prompt_id"], []).append(row)
    if not samples:
        return {}
    missing = [row["prompt_id"] for row in evaluator.rows if row["prompt_id"] not in samples]
    if missing:
        raise UserError(f"{BEST_OF_N}: no answers to {len(missing)} of the prompts; run the stage best_of_n again")
    per_sample = zip(*(samples[row["prompt_id"]] for row in evaluator.rows), strict=True)
    columns = [scored_samples(evaluator, list(column)) for column in per_sample]
    rewards = np.array([mark.rewards for mark in columns]).T
    wanted = stage.block("best_of_n", BestOfNParams).n
    return {f"best_of_{n}": Results(columns, best_of_n_weights(rewards, n), best_of=n) for n in wanted}


def scored_samples(evaluator: Evaluator, rows: list[Row]) -> ScoredAnswers:
    """One sample a prompt, as if its answers had been given here."""
    texts = [row["response"] for row in rows]
    return ScoredAnswers(
        responses=[row["response_ids"] for row in rows],
        ended=[row["ended"] for row in rows],
        texts=texts,
        rewards=[row["reward"] for row in rows],
        gold=evaluator.judge.score(evaluator.prompts, texts) if evaluator.judge else None,
        tokens=[row["tokens"] for row in rows],
        divergence=None,
    )


def row_of(
    stage: Stage[EvaluateParams], evaluator: Evaluator, everybody: Field, name: str, bootstrap: Bootstrap
) -> dict[str, Any]:
    """All figures of one model; null where one does not apply or is not known. The same keys for every model."""
    results, sft, policy = (everybody.results[other] for other in (name, "sft", "policy"))
    figures = own_figures(results, bootstrap)
    figures |= versus("win_rate", evaluator, results, None if name == "sft" else sft, bootstrap, controlled=True)
    figures |= versus("win_rate_vs_policy", evaluator, results, None if name == "policy" else policy, bootstrap)
    ahead = None if name == "policy" else difference(results, policy, "gold", bootstrap)
    figures |= three("gold_minus_policy", ahead)
    if name not in everybody.read:
        figures |= {"kl": best_of_n_kl(results.best_of), "kl_ci95": None}
    figures |= teacher_forced_figures(everybody.read.get(name), everybody.read["sft"], everybody.pairs, bootstrap)
    return figures | costs(stage, name, results)


def versus(
    key: str,
    evaluator: Evaluator,
    results: Results,
    other: Results | None,
    bootstrap: Bootstrap,
    controlled: bool = False,
) -> dict[str, Any]:
    """Win rate over another model; null where that would be itself."""
    if other is None:
        return no_win_rate(key, controlled)
    won = np.array([evaluator.compare(mark, other.column(i)) for i, mark in enumerate(results.columns)]).T
    return against(key, results, other, won, bootstrap, controlled)


def costs(stage: Stage[EvaluateParams], name: str, results: Results) -> dict[str, int | None]:
    """What a model took beyond SFT model, preference data and reward model, which are common to all: answers sampled to
    train it, response tokens that its training read, and answers sampled for each one that it gives. The policy's are
    those of the whole run, whichever snapshot it is."""
    method = BY_NAME.get(name)
    if method or name == "policy":
        paid = [*method.built_on, name] if method else ["ppo"]
        told = [stage.read_json(f"metrics/{part}.json") for part in paid]
        trained = {cost: sum(part[cost] for part in told) for cost in ("samples_generated", "tokens_trained")}
    else:
        trained = dict.fromkeys(
            ("samples_generated", "tokens_trained"), None if name in stage.params.extra_models else 0
        )
    return {**trained, "samples_per_answer": results.best_of}


def validation_pairs(stage: Stage[EvaluateParams]) -> list[Row]:
    """The preference pairs that nothing is trained on."""
    return [row for row in stage.read(PREFERENCES) if row["split"] == "validation"]


def summary(evaluator: Evaluator, models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of SFT model and policy that have always stood at the top, and whose win rate it is."""
    sft, policy = models["sft"], models["policy"]
    top: dict[str, Any] = {
        "judge": evaluator.judge.name if evaluator.judge else None,
        "win_rate_judge": evaluator.winner_named_by,
        "judged_by": evaluator.judged_by,
        "prompts": len(evaluator.rows),
        "win_rate": policy["win_rate"],
        "win_rate_ci95": policy["win_rate_ci95"],
        "ties": policy["ties"],
        "kl_per_sequence": policy["kl"],
        "kl_k3_per_sequence": policy["kl_k3"],
        "missing_eos_share": policy["missing_eos_share"],
        "missing_eos_share_sft": sft["missing_eos_share"],
    }
    for name, model in (("sft", sft), ("policy", policy)):
        keys = ("gold", "reward", "response_tokens", "distinct_1", "distinct_2", "heldout_loss")
        top |= {f"{key}_{name}": model[key] for key in keys}
    return {**top, "alignment_tax": policy["alignment_tax"]}


def sample_rows(evaluator: Evaluator, results: dict[str, Results]) -> list[Row]:
    """Every prompt with the first answers of SFT model and policy side by side."""
    sft, policy = results["sft"].columns[0], results["policy"].columns[0]
    assert policy.divergence is not None  # a snapshot of the SFT model's kind
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
            "kl": policy.divergence.k1[i],
            "sft_tokens": sft.tokens[i],
            "policy_tokens": policy.tokens[i],
        }
        for i, row in enumerate(evaluator.rows)
    ]


def answer_rows(stage: Stage[EvaluateParams], evaluator: Evaluator, results: dict[str, Results]) -> Iterator[Row]:
    """Every answer of every model; of best-of-n the pick of the first n samples."""
    for name, of_model in results.items():
        picks = name.startswith("best_of_")
        columns = [pick(of_model.columns[: of_model.best_of])] if picks else of_model.columns
        for seed, mark in zip(stage.params.seeds, columns, strict=False):
            for i, row in enumerate(evaluator.rows):
                yield {
                    "model": name,
                    "seed": None if picks else seed,
                    "prompt_id": row["prompt_id"],
                    "prompt": row["prompt"],
                    "response": mark.texts[i],
                    "ended": mark.ended[i],
                    "tokens": mark.tokens[i],
                    "reward": mark.rewards[i],
                    "gold": None if mark.gold is None else mark.gold[i],
                    "kl": None if mark.divergence is None else mark.divergence.k1[i],
                }


def track(stage: Stage[EvaluateParams], metrics: dict[str, Any], samples: list[Row], answers: list[Row]) -> None:
    """MLflow: the figures, the answers of the first sampling seed for its evaluation view, and the policy's version."""
    if not stage.tracker:
        return
    stage.tracker.table("evaluate_samples", samples, lead=("prompt", "policy"))
    stage.tracker.table("evaluate_answers", side_by_side(answers, stage.params.seeds[0]), lead=("prompt", "policy"))
    for path in ("metrics/evaluate.json", "plots/frontier.csv"):
        stage.afterwards.append(partial(stage.tracker.artifact, stage.root / path, path.split("/")[0]))
    own = {name: value for name, value in metrics.items() if name != "models"}
    register = partial(stage.tracker.register_policy, stage.hashes["models/policy"], headline_numbers("evaluate", own))
    stage.afterwards.append(register)


def side_by_side(answers: list[Row], seed: int) -> list[Row]:
    """A row a prompt: the prompt, and every model's answer of one sampling seed under the model's name."""
    rows: dict[str, Row] = {}
    for answer in answers:
        if answer["seed"] in (None, seed):
            row = rows.setdefault(answer["prompt_id"], {"prompt": answer["prompt"]})
            row[answer["model"]] = answer["response"]
    return list(rows.values())


if __name__ == "__main__":
    run("evaluate", EvaluateParams, execute)
