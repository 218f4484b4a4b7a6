"""Stage `evaluate`: models, judges and prompts."""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.models.hf import save_checkpoint
from tasks.evaluate import candidate_models
from tasks.evaluation.evaluator import ScoredAnswers, load_candidate
from tasks.evaluation.outputs import costs
from tasks.evaluation.results import pick
from tasks.params.evaluate import EvaluateParams
from tests.tasks.conftest import TINY

if TYPE_CHECKING:
    from tasks.stage.stage import Stage
    from tests.conftest import Ended, Project, TinyRun

Main = Callable[["Project", str], "Ended"]
FAMILY = ["sft", "policy", "best_of_1", "best_of_2", "best_of_4", "rejection_sft", "dpo", "rloo"]


def test_the_pick_has_the_highest_reward_and_is_the_first_of_equals() -> None:
    def scored(name: str, rewards: list[float]) -> ScoredAnswers:
        return ScoredAnswers([[1]] * 2, [True] * 2, [name] * 2, rewards, [float(len(name))] * 2, [1] * 2, None)

    columns = [scored("a", [1.0, 2.0]), scored("bb", [3.0, 2.0]), scored("ccc", [2.0, 1.0])]
    picked = pick(columns)
    assert (picked.texts, picked.rewards, picked.gold) == (["bb", "a"], [3.0, 2.0], [2.0, 1.0])
    judged = pick([replace(column, judging=[float(place)] * 2) for place, column in enumerate(columns)])
    assert judged.judging == [1.0, 0.0]


def test_every_model_has_the_same_figures_on_the_same_prompts(tiny_run: "TinyRun") -> None:
    project = tiny_run.project
    metrics = project.json("metrics/evaluate.json")
    assert list(metrics["models"]) == FAMILY
    assert len({tuple(row) for row in metrics["models"].values()}) == 1, "the same keys in the same order"
    assert {row["answers"] for name, row in metrics["models"].items() if not name.startswith("best_of")} == {80}
    answers = project.rows("data/evaluate/answers.jsonl")
    prompts = {row["prompt_id"] for row in project.rows("data/ingest/heldout.jsonl")}
    for name in FAMILY:
        seeds = [None] if name.startswith("best_of") else [1, 2]
        assert {(r["seed"], r["prompt_id"]) for r in answers if r["model"] == name} == {
            (seed, prompt) for seed in seeds for prompt in prompts
        }


def test_the_figures_at_the_top_are_those_of_the_table(tiny_run: "TinyRun") -> None:
    metrics = tiny_run.project.json("metrics/evaluate.json")
    sft, policy = metrics["models"]["sft"], metrics["models"]["policy"]
    assert (metrics["gold_sft"], metrics["gold_policy"]) == (sft["gold"], policy["gold"])
    assert (metrics["win_rate"], metrics["kl_per_sequence"]) == (policy["win_rate"], policy["kl"])
    assert policy["win_rate"] + sft["win_rate_vs_policy"] == pytest.approx(1.0)
    assert sft["gold_minus_policy"] == pytest.approx(sft["gold"] - policy["gold"])
    assert (sft["kl"], sft["alignment_tax"]) == (0.0, 0.0)
    assert policy["tokens_trained"] == tiny_run.project.json("metrics/ppo.json")["tokens_trained"] > 0


def test_the_frontier_has_a_point_for_every_model_and_snapshot(tiny_run: "TinyRun") -> None:
    lines = (tiny_run.project.root / "plots/frontier.csv").read_text(encoding="utf-8").splitlines()[1:]
    points = [tuple(line.split(",")[:2]) for line in lines]
    assert sorted(points) == sorted(
        [("sft", "0"), ("rejection_sft", "0"), ("dpo", "0"), ("rloo", "0"), ("ppo", "2"), ("ppo", "4")]
        + [("best_of_n", n) for n in ("1", "2", "4")]
        + [("interpolated", eta) for eta in ("0.15", "0.3", "0.5", "0.65", "0.8")]
    )


def test_the_snapshot_that_is_the_policy_has_the_policys_figures(tiny_run: "TinyRun") -> None:
    """All sampling seeds: it is not sampled again."""
    project = tiny_run.project
    policy = project.json("metrics/evaluate.json")["models"]["policy"]
    with (project.root / "plots/frontier.csv").open(encoding="utf-8", newline="") as file:
        rows = {(row["family"], row["point"]): row for row in csv.DictReader(file)}
    for column, key in (("kl", "kl"), ("gold", "gold"), ("reward", "reward"), ("win_rate", "win_rate")):
        assert float(rows["ppo", "4"][column]) == pytest.approx(policy[key])
    assert rows["sft", "0"]["kl"] == "0.0"


def test_the_ceiling_is_above_sft_and_every_model_has_its_share(tiny_run: "TinyRun") -> None:
    metrics = tiny_run.project.json("metrics/evaluate.json")
    models, points = metrics["models"], metrics["optimum"]
    assert [set(row) for row in points] == [{"beta", "kl", "reward", "gold", "effective_samples"}] * len(points)
    assert points[0]["reward"] > models["sft"]["reward"]
    assert [row["kl"] for row in points] == sorted(row["kl"] for row in points)
    assert points[-1]["reward"] > points[0]["reward"]
    assert (models["sft"]["optimum_share"], models["best_of_1"]["optimum_share"]) == (None, None)
    assert models["best_of_2"]["optimum_share"] == pytest.approx(1.0, abs=0.5)


def test_a_users_models_and_prompts_join_and_a_model_may_judge(finished: "Project", stage_main: Main) -> None:
    """A copy of the SFT model has its figures; a model with other tokens has no KL."""
    finished.set("runtime.tracking", False)
    extra = finished.root / "models" / "extra"
    shutil.copytree(finished.root / "models/sft", extra / "copy")
    shutil.copytree(finished.root / "models/sft", finished.root / "models" / "judges" / "judge")
    foreign(finished, "foreign")
    mine = [{"prompt": f"What could I eat on day {day}?"} for day in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in mine)
    (finished.root / "data/raw/mine.jsonl").write_text(text, encoding="utf-8")
    finished.set("evaluate.prompts", "mine.jsonl")
    finished.set("evaluate.extra_models", ["copy", "foreign"])
    finished.set("judge", {"kind": "model", "model": "judge"})
    finished.set("base.scratch.context", 96)
    for stage in ("ingest", "best_of_n"):
        assert stage_main(finished, stage).code == 0
    done = stage_main(finished, "evaluate")
    assert done.code == 2
    assert "is longer than" in done.stderr, "this judge's context is too short for its question"
    assert "answer " not in done.stderr + done.stdout, "refused before any model has answered"
    finished.set("judge", {"kind": "data"})
    assert stage_main(finished, "evaluate").code == 0
    metrics = finished.json("metrics/evaluate.json")
    assert metrics["prompts"] == 3
    models = metrics["models"]
    assert list(models)[-2:] == ["copy", "foreign"]
    for key in ("kl", "heldout_loss"):
        assert models["copy"][key] == models["sft"][key], key
    assert {row["gold"] for row in models.values()} == {None}, "the rubric knows the demo's own prompts only"
    assert metrics["win_rate_judge"] == "reward model"
    assert models["copy"]["tokens_trained"] is None
    assert (models["foreign"]["kl"], models["foreign"]["heldout_loss"]) == (None, None)
    assert (models["foreign"]["kl"], models["foreign"]["optimum_share"]) == (None, None)
    assert stage_main(finished, "report").code == 0


def test_by_default_every_model_answers_once(finished: "Project", stage_main: Main) -> None:
    """No snapshots, interpolated policies or optimum; the report of such an evaluation says what was not measured. The
    progress counts the answers of all models together."""
    for name, value in {"seeds": [1], "snapshots": 0, "interpolation": [], "optimum_samples": 0}.items():
        finished.set(f"evaluate.{name}", value)
        assert EvaluateParams.model_fields[name].get_default(call_default_factory=True) == value
    ended = stage_main(finished, "evaluate")
    assert ended.code == 0
    metrics = finished.json("metrics/evaluate.json")
    assert metrics["optimum"] == []
    assert metrics["models"]["policy"]["optimum_share"] is metrics["models"]["policy"]["gold_spread"] is None
    lines = (finished.root / "plots/frontier.csv").read_text(encoding="utf-8").splitlines()[1:]
    policy = finished.json("metrics/select.json")["step"]
    families = [("sft", "0"), ("rejection_sft", "0"), ("dpo", "0"), ("rloo", "0"), ("ppo", str(policy))]
    assert sorted(tuple(line.split(",")[:2]) for line in lines if "best_of_n" not in line) == sorted(families)
    assert set(metrics["frontier"]) == set(FAMILY) - {"sft", "policy"}
    assert f"answer {5 * 40}/{5 * 40}  done in" in ended.stdout
    assert stage_main(finished, "report").code == 0
    page = (finished.root / "report/index.html").read_text(encoding="utf-8")
    assert "the concave majorant (straight in KL) of SFT and the policy" in page
    assert "Share of the optimum" not in page


@pytest.mark.slow
def test_members_and_a_judging_reward_model_pass_every_stage(finished: "Project", stage_main: Main) -> None:
    """From `reward` to the page: three win rates on the demo, and the judging one's where the rubric cannot judge."""
    finished.set("runtime.tracking", False)
    finished.set("reward.members", 2)
    finished.set("reward.combine", "min")
    finished.set("reward.judge_share", 0.3)
    for stage in ("reward", "ppo", "select", "best_of_n", "rejection_sft", "rloo", "evaluate", "report"):
        done = stage_main(finished, stage)
        assert done.code == 0, (stage, done.stderr)
    with (finished.root / "plots/ppo.csv").open(encoding="utf-8", newline="") as file:
        history = list(csv.DictReader(file))
    assert all(float(row["reward/std"]) > 0 and -1 <= float(row["judge_correlation"]) <= 1 for row in history)
    assert all(row["reward/judge"] not in ("", row["reward_raw"]) for row in history), "by another reward model"
    metrics = finished.json("metrics/evaluate.json")
    rates = ("win_rate", "win_rate_by_reward_model", "win_rate_by_judging_model")
    assert [metrics[rate] for rate in rates] == [metrics["models"]["policy"][rate] for rate in rates]
    assert len({metrics[rate] for rate in rates}) > 1
    assert metrics["judged_by"] == "scores"
    assert len({tuple(row) for row in metrics["models"].values()}) == 1, "the same keys for every model"
    page = (finished.root / "report/index.html").read_text(encoding="utf-8")
    assert "By the judging reward model" in page
    assert "disagreement of the reward models" in page, "a panel of PPO's curves"

    mine = [{"prompt": f"What could I eat on day {day}?"} for day in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in mine)
    (finished.root / "data/raw/mine.jsonl").write_text(text, encoding="utf-8")
    finished.set("evaluate.prompts", "mine.jsonl")
    for stage in ("ingest", "best_of_n", "evaluate", "report"):
        assert stage_main(finished, stage).code == 0
    metrics = finished.json("metrics/evaluate.json")
    assert metrics["judged_by"] == metrics["win_rate_judge"] == "judging reward model"
    for row in metrics["models"].values():
        assert row["win_rate"] == row["win_rate_by_judging_model"]
    page = (finished.root / "report/index.html").read_text(encoding="utf-8")
    assert "By the judging reward model" not in page, "it is the win rate itself"


def foreign(project: "Project", name: str) -> None:
    """The SFT model as one whose vocabulary is another: a token more."""
    folder = project.root / "models" / "extra" / name
    tokenizer = AutoTokenizer.from_pretrained(project.root / "models/sft")
    tokenizer.add_tokens(["zebra"])
    model = AutoModelForCausalLM.from_pretrained(project.root / "models/sft")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("evaluate.extra_models", ["nobody"], "evaluate.extra_models: models/extra/nobody is no Hugging Face folder"),
        ("judge", {"kind": "model", "model": "nobody"}, "judge.model: models/judges/nobody is no Hugging Face folder"),
    ],
)
def test_missing_models_and_prompts_are_named(
    finished: "Project", stage_main: Main, name: str, value: object, says: str
) -> None:
    finished.set("runtime.tracking", False)
    finished.set(name, value)
    done = stage_main(finished, "evaluate")
    assert (done.code, says in done.stderr) == (2, True), done.stderr


def test_costs_are_those_beyond_the_common_stages() -> None:
    """The hybrid pays for its rejection sampling, DPO for no samples of its own, best-of-n for each answer."""
    paid = {
        "ppo": (100, 10), "rejection_sft": (32, 4), "hybrid": (100, 20), "dpo": (0, 7), "rloo": (90, 9),
    }  # fmt: skip
    metrics: dict[str, dict[str, Any]] = {
        f"metrics/{name}.json": {"samples_generated": samples, "tokens_trained": tokens}
        for name, (samples, tokens) in paid.items()
    }
    metrics["metrics/rloo.json"]["recipe"] = "ppo_style"
    metrics["metrics/sft.json"] = {"steps": 5}
    stage: Any = SimpleNamespace(read_json=metrics.__getitem__, params=SimpleNamespace(extra_models=["mine"]))
    plain: Any = SimpleNamespace(best_of=1)
    found = {
        name: tuple(costs(stage, name, plain).values())
        for name in ("sft", "policy", "hybrid", "dpo", "rloo", "mine", "round_1")
    }
    assert found == {
        "sft": (0, 0, 1, None), "policy": (100, 10, 1, None), "hybrid": (132, 24, 1, None), "dpo": (0, 7, 1, None),
        "rloo": (90, 9, 1, "ppo_style"), "mine": (None, None, 1, None), "round_1": (None, None, 1, None),
    }  # fmt: skip
    best: Any = SimpleNamespace(best_of=4)
    assert tuple(costs(stage, "best_of_4", best).values()) == (0, 0, 4, None)


def test_the_policies_of_earlier_rounds_are_compared_under_their_number(
    workshop: Path,
    make_stage: Callable[..., "Stage[Any]"],
    close_round: Callable[[Path, int], None],
) -> None:
    copied = [workshop / "models/policy"]
    for number in (1, 2):
        close_round(workshop, number)
        copied.append(workshop / f"rounds/{number}/policy")
    for seed, folder in enumerate(copied):
        save_checkpoint(folder, TINY.tiny_lm(seed=20 + seed), TINY.tiny_tokenizer())
    stage = make_stage("evaluate", SimpleNamespace(extra_models=[]), [])
    reference = load_candidate(stage, "sft", workshop / "models/sft")
    found = {one.name: one for one in candidate_models(stage, cast(Any, SimpleNamespace(reference=reference)))}
    assert list(found) == ["sft", "policy", "round_1", "round_2"]
    for seed, name in ((21, "round_1"), (22, "round_2")):
        wanted = TINY.tiny_lm(seed=seed).get_input_embeddings().weight
        assert torch.equal(found[name].model.get_input_embeddings().weight, wanted)
