"""Stage `evaluate`: all models of the run answer the same held-out prompts and are scored."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlhf_core.data.tokenizer import closed, load_tokenizer, stop_ids
from rlhf_core.errors import UserError
from rlhf_core.evaluation.best_of_n import best_of_n_weights
from rlhf_core.models.scorers import REWARD_MODEL_NAME
from tasks.datasets.jsonl import Row
from tasks.evaluation.ceiling import add_shares, draw_ceiling
from tasks.evaluation.evaluator import CandidateModel, Evaluator, ScoredAnswers, build_evaluator, load_candidate
from tasks.evaluation.frontier import Frontier, chosen_snapshots, kl_by_step
from tasks.evaluation.judge_reliability import judge_checks, scorer_checks
from tasks.evaluation.outputs import Answered, answer_rows, model_figures, sample_rows, summary
from tasks.evaluation.prompts import evaluation_prompts, source_of
from tasks.evaluation.results import Bootstrap, Results
from tasks.evaluation.teacher_forced import read_demonstrations
from tasks.params.best_of_n import BestOfNParams
from tasks.params.evaluate import HELDOUT, EvaluateParams
from tasks.params.methods import WITH_MODEL
from tasks.select import interpolated, policy_at
from tasks.stage import rounds
from tasks.stage.long_rows import warn_of_cut_answers
from tasks.stage.models import EXTRA, folder_of, set_numerics
from tasks.stage.outputs import rounded
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts
from tasks.summary import SUMMARY, summarise
from tasks.training.gold_judge import judge_of
from tasks.training.scalar_models import ScalarModels
from tasks.training.scorer import judging_scorer_of

BEST_OF_N = "data/best_of_n/samples.jsonl"
SELECT = "metrics/select.json"
SELECT_TABLE = "plots/select.csv"


def execute(stage: Stage[EvaluateParams]) -> None:
    """Make data/evaluate/{samples,answers}.jsonl, metrics/{evaluate,summary}.json and plots/frontier.csv."""
    set_numerics(stage)
    evaluator, too_long = evaluator_of(stage)
    count, reads = work_to_do(stage, evaluator)
    evaluator = replace(evaluator, progress=stage.progress(count, "answer", reads=reads))
    bootstrap = Bootstrap(stage.params.bootstrap, stage.seed)
    answered = answer_all(stage, evaluator)
    results = answered.results
    models = {name: model_figures(stage, evaluator, answered, name, bootstrap) for name in results}
    optimum = add_shares(answered.ceiling, models)
    frontier = Frontier(evaluator, results, answered.snapshots, models, bootstrap, answered.interpolated)
    metrics = {
        **summary(evaluator, models),
        "prompts_too_long": too_long,
        "seeds": stage.params.seeds,
        "bootstrap": stage.params.bootstrap,
        "models": models,
        **frontier.figures(),
        "optimum": optimum,
        "stopping": frontier.stopping(stage.read_json(SELECT)),
        "judge_checks": judge_checks(stage, evaluator, results),
        "reward_model": scorer_checks(results, bootstrap),
    }
    stage.write_metrics(metrics)
    figures = summarise(metrics, stage.read_json("metrics/reward.json"), stage.read_json("metrics/ppo.json"))
    stage.outputs.write_json(SUMMARY, rounded(figures))
    stage.outputs.write_csv("plots/frontier.csv", frontier.rows())
    samples = sample_rows(evaluator, results)
    answers = list(answer_rows(stage, evaluator, results))
    stage.outputs.write_jsonl("data/evaluate/samples.jsonl", samples)
    stage.outputs.write_jsonl("data/evaluate/answers.jsonl", answers)


def evaluator_of(stage: Stage[EvaluateParams]) -> tuple[Evaluator, int]:
    """The evaluator of the prompts that fit, and the number of the others. Raises UserError for a bad extra model
    before any model answers."""
    params = stage.params
    for name in params.extra_models:
        folder = folder_of(stage, EXTRA, name, "evaluate.extra_models")
        stop_ids(load_tokenizer(folder, trust_remote_code=trusts(stage)), None, params.stop_tokens)
    sft = load_candidate(stage, "sft", stage.root / "models/sft")
    rows = evaluation_prompts(stage, params)
    judging = judging_scorer_of(
        stage.root, sft.tokenizer, params.batch_size, ScalarModels(trusts(stage), stage.precision, log=stage.log)
    )
    judge = judge_of(stage) if params.prompts == HELDOUT else None  # the demo's judge scores the demo's prompts only
    longest = params.max_prompt_tokens
    return build_evaluator(
        stage, source_of(params), rows, sft, params, judge, judging=judging, max_prompt_tokens=longest
    )


def answer_all(stage: Stage[EvaluateParams], evaluator: Evaluator) -> Answered:
    """All models' answers. In memory are the SFT model and one other model at a time, beside the policy two."""
    answered, first = Answered(), stage.params.seeds[:1]
    for candidate in candidate_models(stage, evaluator):
        name = candidate.name
        answered.results[name] = Results.of(evaluator.answer(candidate, stage.params.seeds))
        cut = [not ended for column in answered.results[name].columns for ended in column.ended]
        limit = stage.params.max_new_tokens
        warn_of_cut_answers(stage, candidate.tokenizer, name, cut, limit, "evaluate.max_new_tokens")
        answered.demonstrated[name] = read_demonstrations(evaluator, candidate)
        if name == "policy":
            answered.results |= best_of_n(stage, evaluator)
            for eta in stage.params.interpolation:
                mixed = interpolated(evaluator.reference, candidate, eta)
                answered.interpolated[eta] = Results.of(evaluator.answer(mixed, first))
                del mixed
            if samples := stage.params.optimum_samples:
                answered.ceiling = draw_ceiling(evaluator, candidate, answered.results, samples)
        del candidate  # free memory before the next one is loaded
    snapshot = None
    for step, is_policy in snapshots_of(stage):
        if is_policy:  # it is not sampled again
            answered.snapshots[step] = answered.results["policy"]
        else:
            snapshot = policy_at(stage, evaluator.reference, step, snapshot)
            answered.snapshots[step] = Results.of(evaluator.answer(snapshot, first))
    return answered


def candidate_models(stage: Stage[EvaluateParams], evaluator: Evaluator) -> Iterator[CandidateModel]:
    """SFT model, policy, the models of other methods, the policies of earlier rounds, the user's models."""
    yield evaluator.reference
    for name, folder in candidates(stage):
        yield load_candidate(stage, name, folder)


def candidates(stage: Stage[EvaluateParams]) -> list[tuple[str, Path]]:
    """Name and folder of each model but the SFT model."""
    methods = [(method.name, stage.root / "models" / method.name) for method in WITH_MODEL]
    earlier = range(1, rounds.last_closed(stage.root) + 1)
    return [
        ("policy", stage.root / "models/policy"),
        *((name, folder) for name, folder in methods if (folder / "config.json").is_file()),
        *((f"round_{number}", stage.root / rounds.path_in(number, rounds.POLICY)) for number in earlier),
        *((name, folder_of(stage, EXTRA, name, "evaluate.extra_models")) for name in stage.params.extra_models),
    ]


def snapshots_of(stage: Stage[EvaluateParams]) -> list[tuple[int, bool]]:
    """The steps of the snapshots on the frontier, and whether each is the policy."""
    selected, kls = stage.read_json(SELECT), kl_by_step(stage.root / SELECT_TABLE)
    steps = chosen_snapshots(kls, selected, stage.params.snapshots)
    return [(step, step == selected["step"] and selected["eta"] == 1) for step in steps]


def work_to_do(stage: Stage[EvaluateParams], evaluator: Evaluator) -> tuple[int, int]:
    """For the progress: the answers of all models, and how many answers are read by a reward model, or by a model and
    the SFT model for their KL."""
    params, samples = stage.params, stage.params.optimum_samples
    seeds, drawn = len(params.seeds), max(stage.block("best_of_n", BestOfNParams).n) if stage.read(BEST_OF_N) else 0
    each = (1 + len(candidates(stage))) * seeds + len(params.interpolation)
    each += sum(not is_policy for _, is_policy in snapshots_of(stage))
    each += max(0, samples - seeds - drawn) + max(0, samples - seeds)
    judging = int(evaluator.judging is not None)
    reads = each * (int(evaluator.scorer.name == REWARD_MODEL_NAME) + judging + 1)
    reads += drawn * judging + max(samples, seeds if samples else 0)
    return each * len(evaluator.rows), reads * len(evaluator.rows)


def best_of_n(stage: Stage[EvaluateParams], evaluator: Evaluator) -> dict[str, Results]:
    """The samples of the stage `best_of_n`, for each n with the weights of its estimator."""
    samples: dict[str, list[Row]] = {}
    for row in stage.read(BEST_OF_N):
        samples.setdefault(row["prompt_id"], []).append(row)
    if not samples:
        return {}
    missing = [row["prompt_id"] for row in evaluator.rows if row["prompt_id"] not in samples]
    if missing:
        raise UserError(f"{BEST_OF_N}: no answers to {len(missing)} of the prompts; run the stage best_of_n again")
    columns, places = [], range(len(evaluator.rows))
    for rows in zip(*(samples[row["prompt_id"]] for row in evaluator.rows), strict=True):  # one sample for each prompt
        texts, ended = [row["response"] for row in rows], [row["ended"] for row in rows]
        responses = [row["response_ids"] for row in rows]
        ids = closed(responses, ended, int(evaluator.reference.tokenizer.eos_token_id))
        column = ScoredAnswers(
            responses=responses,
            ended=ended,
            texts=texts,
            rewards=[row["reward"] for row in rows],
            gold=evaluator.totals(evaluator.judge, places, texts, ids),
            tokens=[row["tokens"] for row in rows],
            divergence=None,
            judging=evaluator.totals(evaluator.judging, places, texts, ids),
            terms={name: [row["terms"][name] for row in rows] for name in rows[0].get("terms") or {}},
        )
        columns.append(column)
    rewards = np.array([column.rewards for column in columns]).T
    wanted = stage.block("best_of_n", BestOfNParams).n
    return {f"best_of_{n}": Results(columns, best_of_n_weights(rewards, n), best_of=n) for n in wanted}
