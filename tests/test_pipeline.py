"""The whole tiny pipeline through `dvc repro`: what it leaves, what a change reruns, and that it can be repeated."""

import csv
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_core.determinism import OURS, WORKSPACE
from tasks import summary
from tasks.params.methods import BY_NAME, VARIANTS
from tasks.tracking.exporter import export
from tests import warm

if TYPE_CHECKING:
    from tests.conftest import Ended, Project, Reproduce, TinyRun

STAGES = ["check", "check_data", "ingest", "base", "sft", "preferences", "reward", "ppo", "select", *BY_NAME]
STAGES += ["evaluate", "report"]
SWITCHED_OFF = {"hybrid", "reinforce", "grpo", "ipo"}
"""In examples/tiny.yaml; they have no run in MLflow."""
METRICS = {
    "ingest": "source rows_read rows_used dropped demonstrations pairs preference_prompts ppo_prompts heldout "
    "rows_by_use",
    "base": "parameters vocabulary context train_loss steps",
    "sft": "train_loss validation_loss validation_perplexity base_validation_loss best_step steps tokens",
    "preferences": "prompts samples pairs ties_dropped missing_eos_share mean_response_tokens annotator_agreement "
    "judge",
    "reward": "heldout_accuracy heldout_accuracy_low heldout_accuracy_high heldout_loss heldout_pairs train_accuracy "
    "expected_calibration_error",
    "ppo": "steps reward_first reward_last gold_first gold_last kl_last entropy_last kl_coef_last "
    "missing_eos_share_last explained_variance_last optimizer_steps samples_generated tokens_trained alerts "
    "score_mean score_std length_correlation gold_correlation",
    "select": "rule step eta kl kl_budget last_step best_judge_step best_proxy_step prompts",
    "best_of_n": "enabled prompts samples_generated reward_mean reward_best",
    "rejection_sft": "enabled prompts samples_generated tokens_trained reward_mean reward_best validation_loss",
    "dpo": "enabled heldout_loss heldout_accuracy samples_generated tokens_trained",
    "rloo": "enabled steps kl_last gold_last samples_generated tokens_trained alerts",
    "evaluate": "judge win_rate_judge prompts gold_sft gold_policy gold_policy_low gold_policy_high reward_sft "
    "reward_policy win_rate win_rate_low win_rate_high "
    "ties kl_per_sequence response_tokens_sft response_tokens_policy "
    "missing_eos_share missing_eos_share_sft distinct_2_sft distinct_2_policy "
    "heldout_loss_sft heldout_loss_policy alignment_tax seeds bootstrap models frontier optimum judge_checks "
    "reward_model",
}
PLOTS = {
    "sft": "step train_loss validation_loss",
    "reward": "step loss accuracy",
    "reward_calibration": "bin_low bin_high predicted observed pairs",
    "reward_margins": "low high accuracy accuracy_low accuracy_high pairs",
    "reward_scores": "low high chosen rejected",
    "select": "step eta kl kl_standard_error reward gold win_rate prompts",
    "rejection_sft": "step train_loss validation_loss",
    "dpo": "step loss accuracy margin",
    "rloo": "step reward_raw score gold kl entropy tokens_trained",
    "frontier": "family point kl sqrt_kl gold gold_low gold_high reward reward_low reward_high win_rate",
    "ppo": "step reward_raw score reward_shaped gold kl kl_k1 kl_k2 kl_k3 entropy clip_fraction value_clip_fraction "
    "advantage_abs policy_loss value_loss explained_variance grad_norm_policy grad_norm_critic response_tokens_mean "
    "response_tokens_max missing_eos_share ratio_max approx_kl kl_coef learning_rate engine_mismatch_max "
    "engine_mismatch_k3 min_token_reward repeated_ngram_share optimizer_steps clip_fraction_last_epoch",
}
DATA = ["ingest/demonstrations", "ingest/pairs", "ingest/preference_prompts", "ingest/ppo_prompts", "ingest/heldout"]
DATA += [
    "ingest/dropped",
    "ingest/evaluation_prompts",
    "preferences/preferences",
    "preferences/samples",
    "ppo/samples",
    "evaluate/samples",
]
DATA += ["best_of_n/samples", "rejection_sft/samples", "evaluate/answers", "ingest/ratings"]
DATA += ["ingest/evaluation_prompts"]
ALTERNATIVES = ["rejection_sft", "dpo", "rloo"]
"""Those that the tiny run trains."""


@pytest.fixture
def first(tiny_run: "TinyRun") -> "Project":
    """The project of the one tiny run, to look at."""
    return tiny_run.project


def table(project: "Project", name: str) -> list[dict[str, str]]:
    with (project.root / "plots" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_stages_run_in_their_order(tiny_run: "TinyRun") -> None:
    assert tiny_run.ran == STAGES


@pytest.mark.parametrize("stage", METRICS)
def test_metrics_have_the_names_that_others_rely_on(first: "Project", stage: str) -> None:
    metrics = first.json(f"metrics/{stage}.json")
    assert set(METRICS[stage].split()) <= metrics.keys()


def test_no_figure_is_a_list_of_numbers(first: "Project") -> None:
    """DVC and MLflow drop lists. Sampling seeds are settings."""

    def lists(value: Any, name: str = "") -> list[str]:
        if isinstance(value, dict):
            return [found for key, each in value.items() for found in lists(each, key)]
        return [name] if isinstance(value, list) and any(isinstance(each, int | float) for each in value) else []

    assert {name for stage in METRICS for name in lists(first.json(f"metrics/{stage}.json"))} == {"seeds"}


def test_intervals_enclose_what_they_are_about(first: "Project") -> None:
    evaluate, reward = first.json("metrics/evaluate.json"), first.json("metrics/reward.json")
    for found, name in ((evaluate, "win_rate"), (reward, "heldout_accuracy")):
        low, high = found[f"{name}_low"], found[f"{name}_high"]
        assert 0 <= low <= high <= 1
        assert low <= found[name] + 0.1
        assert found[name] - 0.1 <= high
    assert evaluate["prompts"] == 40
    assert "simulated" in evaluate["win_rate_judge"]


@pytest.mark.parametrize("name", PLOTS)
def test_plots_have_the_columns_that_others_rely_on(first: "Project", name: str) -> None:
    rows = table(first, name)
    assert set(PLOTS[name].split()) <= rows[0].keys()


def test_ppo_writes_a_row_a_step_and_its_first_ratio_is_one(first: "Project") -> None:
    rows = table(first, "ppo")
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert float(rows[0]["kl"]) == pytest.approx(0.0, abs=1e-4), "before the first update the policy is its reference"
    assert max(float(row["engine_mismatch_max"]) for row in rows) < 1e-3


def test_failure_04_samples_are_on_disk_as_often_as_was_asked(first: "Project") -> None:
    assert {path.relative_to(first.root / "data").as_posix() for path in first.root.glob("data/*/*.jsonl")} == {
        f"{name}.jsonl" for name in DATA
    }
    assert len(first.rows("data/evaluate/samples.jsonl")) == 40
    watched = first.rows("data/ppo/samples.jsonl")
    assert sorted({row["step"] for row in watched}) == [0, 2, 4]
    assert len(watched) == 3 * 20


def test_failure_04_the_policy_is_evaluated_on_prompts_that_no_stage_trained_on(first: "Project") -> None:
    asked = {row["prompt_id"] for row in first.rows("data/evaluate/samples.jsonl")}
    assert asked <= {row["prompt_id"] for row in first.rows("data/ingest/heldout.jsonl")}
    for name in ("ingest/demonstrations", "ingest/pairs", "ingest/ppo_prompts", "preferences/preferences"):
        assert not asked & {row["prompt_id"] for row in first.rows(f"data/{name}.jsonl")}, name


def test_failure_05_the_reward_model_is_measured_on_prompts_it_was_not_trained_on(first: "Project") -> None:
    rows = first.rows("data/preferences/preferences.jsonl")
    train, validation = (
        {row["prompt_id"] for row in rows if row["split"] == split} for split in ("train", "validation")
    )
    assert train
    assert not train & validation
    metrics = first.json("metrics/reward.json")
    assert metrics["heldout_prompts"] == len(validation) > 0
    assert metrics["heldout_pairs"] == sum(row["split"] == "validation" for row in rows)


@pytest.mark.parametrize("name", ["base", "sft", "policy", *ALTERNATIVES])
def test_language_models_load(first: "Project", name: str) -> None:
    folder = first.root / "models" / name
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello?"}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))


@pytest.mark.parametrize("name", ["reward", "critic"])
def test_scalar_models_load(first: "Project", name: str) -> None:
    folder = first.root / "models" / name
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)("Hello", return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape == (1, 1)
    assert model.score.weight.abs().sum() > 0


def test_no_pickle_and_nothing_of_this_machine_in_the_outs(first: "Project") -> None:
    outputs = first.outputs()
    assert not [name for name in outputs if name.endswith((".bin", ".pt", ".pkl"))]
    marks = [str(first.root), str(Path.home()) + "/", sys.prefix, os.uname().nodename]
    year = re.compile(rb"20[0-9]{2}-[0-9]{2}-[0-9]{2}[T ]")
    for name, content in outputs.items():
        assert not [mark for mark in marks if len(mark) > 6 and mark.encode() in content], name
        assert not year.search(content), name


def test_dvc_shows_metrics_plots_and_parameters(finished: "Project") -> None:
    shown = json.loads(finished.dvc("metrics", "show", "--json").stdout)[""]["data"]
    assert shown[summary.SUMMARY] == {"data": summary.read(finished.root)}
    assert "index.html" in finished.dvc("plots", "show").stdout
    finished.set("ppo.kl.coef", 0.07)
    assert "ppo.kl.coef" in finished.dvc("params", "diff").stdout


def test_a_second_repro_runs_nothing(finished: "Project") -> None:
    before = finished.outputs()
    assert finished.repro() == []
    assert finished.outputs() == before


def test_what_cannot_change_a_result_runs_nothing_but_check(finished: "Project") -> None:
    finished.set("runtime.checkpoint_every", 7)
    before = finished.outputs()
    assert finished.repro() == ["check"]
    after = finished.outputs()
    assert {name for name in before if before[name] != after[name]} == {"dvc.lock"}


@pytest.mark.slow
def test_a_change_of_the_leash_reruns_what_depends_on_it_and_back_runs_nothing(
    finished: "Project", reproduce: "Reproduce"
) -> None:
    before, params = finished.outputs(), (finished.root / "params.yaml").read_bytes()
    finished.set("ppo.kl.coef", 2.0)
    assert reproduce(finished) == ["check", "ppo", "select", *VARIANTS, "evaluate", "report"]
    changed = finished.outputs()
    upstream = [name for name in before if name.startswith(("models/sft", "models/reward", "data/preferences"))]
    assert upstream
    assert {name: changed[name] for name in upstream} == {name: before[name] for name in upstream}
    assert changed["models/policy/model.safetensors"] != before["models/policy/model.safetensors"]
    assert finished.json("metrics/ppo.json")["kl_coef_last"] == 2.0
    look_at_two_pipeline_runs(finished)

    (finished.root / "params.yaml").write_bytes(params)
    assert reproduce(finished) == ["check"], "DVC has the other results already"
    assert finished.outputs() == before


def look_at_two_pipeline_runs(project: "Project") -> None:
    """The compare page answers what changed and what it did; what did not run is linked to the run that made it."""
    parents = pipeline_runs(project)
    assert sorted(run.data.params["ppo.kl.coef"] for run in parents) == ["0.05", "2"]
    new = next(run for run in parents if run.data.params["ppo.kl.coef"] == "2")
    assert set(children(project, new)) == {"ppo", "select", *VARIANTS, "evaluate", "report"} - SWITCHED_OFF
    assert new.data.metrics["gold_sft"] == project.json("metrics/evaluate.json")["gold_sft"]
    assert len(new.data.tags["leash.restored.sft"]) == 32


def address(project: "Project") -> str:
    return f"sqlite:///{project.root / 'mlflow.db'}"


def client(project: "Project") -> MlflowClient:
    return MlflowClient(address(project))


def search(project: "Project") -> list[Run]:
    export(project.root, address(project))
    found = client(project)
    return list(found.search_runs([found.get_experiment_by_name("leash").experiment_id]))


def pipeline_runs(project: "Project") -> list[Run]:
    return [run for run in search(project) if "mlflow.parentRunId" not in run.data.tags]


def children(project: "Project", parent: Run) -> dict[str, Run]:
    own = [run for run in search(project) if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    return {run.data.tags["leash.stage"]: run for run in own}


def numbers_of(project: "Project", stage: str) -> dict[str, Any]:
    figures = project.json(f"metrics/{stage}.json")
    numbers = {k: v for k, v in figures.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {name: pytest.approx(float(value), rel=1e-4) for name, value in numbers.items()}


def test_mlflow_has_the_pipeline_run_and_a_child_a_stage(finished: "Project") -> None:
    (parent,) = pipeline_runs(finished)
    assert parent.info.status == "FINISHED"
    assert parent.data.params["ppo.kl.coef"] == "0.05"
    assert parent.data.params["ingest.source"] == "demo"
    headline = [name for name in parent.data.metrics if not name.startswith("ppo/")]
    assert {"gold_policy", "win_rate", "kl_per_sequence", "reward_accuracy"} <= set(headline)
    assert len(headline) <= 20
    assert parent.data.metrics["win_rate"] == finished.json("metrics/evaluate.json")["win_rate"]
    stages = children(finished, parent)
    for stage in METRICS:
        expected = numbers_of(finished, stage)
        assert {name: stages[stage].data.metrics.get(name) for name in expected} == expected
    assert stages.keys() == set(STAGES) - {"check", "check_data"} - SWITCHED_OFF, "they are not tracked"
    assert {run.info.status for run in stages.values()} == {"FINISHED"}
    history = client(finished).get_metric_history(stages["ppo"].info.run_id, "ppo/kl")
    assert [point.step for point in history] == [1, 2, 3, 4]
    assert stages["ppo"].data.params["ppo.clip_ratio"] == "0.2"
    inputs = {entry.dataset.name for entry in stages["ppo"].inputs.dataset_inputs}
    assert {"ppo_prompts", "heldout"} <= inputs
    files = client(finished).list_artifacts(stages["report"].info.run_id, "report")
    assert "report/index.html" in [file.path for file in files]


def test_the_policy_is_registered_by_reference(finished: "Project") -> None:
    export(finished.root, address(finished))
    version = client(finished).get_model_version_by_alias("leash-policy", "current")
    lock = (finished.root / "dvc.lock").read_text(encoding="utf-8")
    digest = re.search(r"path: models/policy\n\s+hash: md5\n\s+md5: (\S+)", lock)
    assert digest is not None
    assert version.source.startswith(f"dvc://models/policy?md5={digest[1]}&project=")


@pytest.mark.slow
def test_stop_tokens_reach_every_stage_that_samples(finished: "Project", stage_main: Callable[..., "Ended"]) -> None:
    """Responses close with them, and the policy's own folder tells others so."""
    before = [row["sft"] for row in finished.rows("data/evaluate/samples.jsonl")]
    stages = ("preferences", "ppo", "select", "best_of_n", "rejection_sft", "evaluate")
    for stage in ("preferences", "ppo", "rejection_sft", "evaluate"):
        finished.set(f"{stage}.stop_tokens", ["e"])
    finished.set("runtime.tracking", False)
    tokenizer = AutoTokenizer.from_pretrained(finished.root / "models/sft")
    stops = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("e")}
    for stage in stages:
        assert stage_main(finished, stage).code == 0
    samples = finished.rows("data/preferences/samples.jsonl")
    assert {row["response_ids"][-1] for row in samples if row["ended"]} == stops
    assert not any(stops & set(row["response_ids"][:-1]) for row in samples)
    assert set(finished.json("models/policy/generation_config.json")["eos_token_id"]) == stops
    after = [row["sft"] for row in finished.rows("data/evaluate/samples.jsonl")]
    assert all(long.startswith(short) for long, short in zip(before, after, strict=True))
    assert sum(len(text) for text in after) < sum(len(text) for text in before)


@pytest.mark.slow
def test_failure_09_two_clones_in_other_places_give_the_same_lock(project: "Project", first: "Project") -> None:
    """Another folder, hash seed, time zone, locale and user, new interpreters for four stages: the same bytes."""
    other = {"PYTHONHASHSEED": "42", "TZ": "America/Lima", "LC_ALL": "C", "USER": "nobody"}
    ran = project.repro(**other, **{warm.NEW_INTERPRETERS: "sft reward ppo evaluate"})
    assert ran == STAGES
    assert (project.root / "dvc.lock").read_text() == (first.root / "dvc.lock").read_text()
    assert project.outputs() == first.outputs()
    assert json.loads((project.root / "metrics/evaluate.json").read_text()) == first.json("metrics/evaluate.json")


@pytest.fixture
def _switches_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stage selects threads and kernels for its process."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    monkeypatch.setenv(WORKSPACE, OURS)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warns)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_switches_as_before")
def test_the_whole_pipeline_runs_in_bfloat16_and_without_deterministic_kernels(
    project: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    """Frozen models are read in bfloat16; saved ones are float32. What makes no equal bytes says so."""
    project.set("runtime.tracking", False)
    project.set("precision", "bfloat16")
    project.set("deterministic", False)
    for stage in STAGES:
        ended = stage_main(project, stage)
        assert ended.code == 0, f"{stage}: {ended.stderr}"
        said = "WARNING deterministic: false" in ended.stdout
        assert said == (
            stage in {"base", "sft", "preferences", "reward", "ppo", "select", *ALTERNATIVES, "best_of_n", "evaluate"}
        )
    provenance = project.json("models/sft.provenance.json")
    assert provenance["params"]["precision"] == "bfloat16"
    assert "deterministic: false" in provenance["exemptions"][0]
    assert "deterministic: false" in (project.root / "report/index.html").read_text(encoding="utf-8")
    weights = {kind: project.root / f"models/{kind}" for kind in ("policy", "critic", "reward", "dpo")}
    for folder in weights.values():
        [file] = folder.glob("*.safetensors")
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}
    for file in (project.root / "models/snapshots").glob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    rows = table(project, "ppo")
    assert float(rows[0]["kl"]) == pytest.approx(0.0, abs=1e-3), "the reference differs by its rounding only"
