"""MLflow agrees with the records: one run a stage key, points by step, and a second call makes nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tasks.tracking import record, settings, sync
from tasks.tracking.exporter import Unreachable, export
from tests.tasks.tracking.conftest import EVALUATION, evaluate, pipeline, runs, stage

Look = Callable[[], MlflowClient]
PLOT = "step,kl,gold\n1,0.1,1.0\n2,0.2,\n"


def whole(root: Path) -> Path:
    """A pipeline run of reward, ppo, evaluate and report."""
    folder = pipeline(root)
    stage(root, folder, "reward", "1" * 64, {"metrics/reward.json": {"heldout_accuracy": 0.9, "enabled": True}})
    stage(root, folder, "ppo", "2" * 64, {"metrics/ppo.json": {"alerts": [{}]}, "plots/ppo.csv": PLOT}, points=2)
    evaluate(root, folder)
    stage(root, folder, "report", "3" * 64, {"report/index.html": "<p>", "report/kl.png": "x"})
    return folder


def content(root: Path) -> dict[str, list[Any]]:
    """What MLflow's tables hold, without ids and times."""
    queries = {
        "runs": "select name, status from runs",
        "params": "select key, value from params",
        "metrics": "select key, step, value from metrics",
        "tags": "select key from tags where key not in ('leash.restarts')",
        "inputs": "select source_type, destination_type from inputs",
        "datasets": "select name, digest from datasets",
        "models": "select name from logged_models",
        "versions": "select name, version from model_versions",
        "aliases": "select alias, version from registered_model_aliases",
    }
    with closing(sqlite3.connect(root / "mlflow.db")) as base:
        return {name: sorted(map(repr, base.execute(query))) for name, query in queries.items()}


def test_a_pipeline_run_with_a_run_for_each_stage(root: Path, look: Look) -> None:
    whole(root)
    assert export(root) == []
    parent, *stages = runs(look())
    assert parent.info.run_name == "c0ffee0"
    assert parent.data.params["ppo.kl.coef"] == "0.05"
    assert {name: parent.data.metrics[name] for name in ("win_rate", "reward_accuracy", "alerts", "ppo/kl")} == {
        "win_rate": 0.8, "reward_accuracy": 0.9, "alerts": 1.0, "ppo/kl": 0.2}  # fmt: skip
    assert {run.data.tags["leash.stage"]: run.info.status for run in stages} == dict.fromkeys(
        ("reward", "ppo", "evaluate", "report"), "FINISHED"
    )
    assert {run.data.tags["mlflow.parentRunId"] for run in stages} == {parent.info.run_id}
    by_stage = {run.data.tags["leash.stage"]: run for run in stages}
    history = look().get_metric_history(by_stage["ppo"].info.run_id, "ppo/kl")
    assert [(point.step, point.value) for point in history] == [(1, 0.1), (2, 0.2)]
    assert by_stage["reward"].data.metrics == {"heldout_accuracy": 0.9}, "and no `enabled`"
    answers = hashlib.md5((root / "data/evaluate/answers.jsonl").read_bytes(), usedforsecurity=False).hexdigest()
    assert by_stage["evaluate"].data.tags["leash.out.data/evaluate/answers.jsonl"] == answers
    assert parent.info.status == "FINISHED"
    lines = parent.data.tags["mlflow.note.content"].split("\n\n")
    assert lines[0].startswith("gold_policy **3**, win_rate **0.8**")
    files = [file.path for file in look().list_artifacts(by_stage["report"].info.run_id, "report")]
    assert files == ["report/index.html", "report/kl.png"]


def test_a_second_call_makes_nothing(root: Path) -> None:
    folder = whole(root)
    export(root)
    before = content(root)
    assert record.pending(root, settings.uri_mark(settings.tracking_uri(root))) == [], "all has arrived"
    for execution in record.executions(folder):
        record.write(execution["folder"] / record.FACTS, record.read(execution["folder"] / record.FACTS))
    export(root)
    assert content(root) == before


@pytest.mark.parametrize("answered", [False, True])
def test_killed_at_any_request_the_next_call_makes_what_is_missing(
    root: Path, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """Killed before or after the server had a request: in the end it holds what it holds without a kill."""
    empty = (root / "mlflow.db").read_bytes()
    whole(root)
    export(root)
    expected = content(root)
    (root / "mlflow.db").write_bytes(empty)
    whole(root)
    killed = 0
    for allowed in (0, 1, 3, 6, 9, 12, 16, 20):  # requests of each process that is killed
        with monkeypatch.context() as patch:
            left = [allowed]
            for name in dir(MlflowClient):
                if name.startswith(("create_", "log_", "set_", "update_", "finalize_")):
                    patch.setattr(MlflowClient, name, deadly(getattr(MlflowClient, name), left, answered))
            with suppress(KeyboardInterrupt):
                export(root)
                break
        killed += 1
    export(root)
    assert killed > 3
    assert content(root) == expected


def deadly(function: Any, left: list[int], answered: bool) -> Any:
    """`function` until no call is left; then it is interrupted, before its work or after."""

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and not answered:
            raise KeyboardInterrupt
        result = function(*args, **kwargs)
        if left[0] < 0:
            raise KeyboardInterrupt
        return result

    return call


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'boto3'"), MlflowException("403 Forbidden")])
def test_a_file_that_cannot_be_uploaded_is_noted_and_tried_again(
    root: Path, look: Look, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    whole(root)

    def refuse(*args: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_artifact", refuse)
        missing = export(root)
    assert any(line.startswith(f"report/index.html of c0ffee0: {error}") for line in missing)
    parent = runs(look())[0]
    assert str(error) in parent.data.tags["leash.missing"]
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["win_rate"] == 0.8
    assert len(look().search_model_versions()) == 1
    assert export(root) == []
    parent = runs(look())[0]
    assert not parent.data.tags["leash.missing"]
    assert [file.path for file in look().list_artifacts(parent.info.run_id, "report")] == ["report/index.html"]


def test_a_restored_stage_is_linked_to_the_run_that_made_it(root: Path, look: Look) -> None:
    whole(root)
    export(root)
    folder = pipeline(root, "b" * 64, {"ppo.kl.coef": "0.2"})
    restored(root, folder, "reward", "1" * 64, {"metrics/reward.json": {"heldout_accuracy": 0.9}})
    stage(root, folder, "ppo", "4" * 64, {"metrics/ppo.json": {"alerts": []}}, points=3)
    export(root)
    found = runs(look())
    new = next(run for run in found if run.data.tags.get("leash.pipeline_key") == "b" * 64)
    maker = next(run for run in found if run.data.tags.get("leash.stage") == "reward")
    assert new.data.tags["leash.restored.reward"] == maker.info.run_id
    assert sum(run.data.tags.get("leash.stage") == "reward" for run in found) == 1
    assert new.info.run_name == "kl.coef 0.05 → 0.2"
    assert "Changed since *c0ffee0*: `ppo.kl.coef` 0.05 → 0.2" in new.data.tags["mlflow.note.content"]


def test_a_later_call_changes_no_run_of_stages_that_count_as_restored_now(root: Path, look: Look) -> None:
    """As after a move to another workspace and back: the record is gone, and dvc.lock has the results."""
    folder = pipeline(root)
    stage(root, folder, "reward", "1" * 64, {"metrics/reward.json": {"heldout_accuracy": 0.9}})
    stage(root, folder, "ppo", "2" * 64, points=3)
    export(root)
    before = [(run.info.end_time, run.info.status, run.data.tags, run.data.metrics) for run in runs(look())]
    shutil.rmtree(folder)
    again = pipeline(root, tags={"leash.commit": "badbad11" * 5, "leash.dirty": "true", "leash.data": "d"})
    for name, key in (("reward", "1" * 64), ("ppo", "2" * 64)):
        restored(root, again, name, key, {})
    export(root)
    after = [(run.info.end_time, run.info.status, run.data.tags, run.data.metrics) for run in runs(look())]
    assert after == before


def restored(root: Path, folder: Path, name: str, key: str, files: dict[str, Any]) -> None:
    live = stage(root, folder, name, key, files)
    (live.folder / record.LIVE).unlink()
    record.write(live.folder / record.FACTS, record.read(live.folder / record.FACTS) | {"restored": True})


def test_the_curves_of_ppo_are_there_where_dvc_restored_it(root: Path, look: Look) -> None:
    """From its plot: MLflow may have no run of it, as in a clone, and the pipeline's run has them in any case."""
    restored(root, pipeline(root), "ppo", "2" * 64, {"metrics/ppo.json": {"alerts": []}, "plots/ppo.csv": PLOT})
    export(root)
    parent, child = runs(look())
    for run in (parent, child):
        history = look().get_metric_history(run.info.run_id, "ppo/kl")
        assert [(point.step, point.value) for point in history] == [(1, 0.1), (2, 0.2)]
    assert child.data.tags["leash.restored"] == "true"


def test_a_stage_that_goes_on_continues_its_run(root: Path, look: Look) -> None:
    folder = pipeline(root)
    stage(root, folder, "ppo", points=3, end="KILLED")
    export(root)
    (parent, child) = runs(look())
    assert (parent.info.status, child.info.status) == ("KILLED", "KILLED")
    stage(root, folder, "ppo", points=4, end=None)
    export(root)
    (parent, child) = runs(look())
    assert (parent.info.status, child.info.status) == ("RUNNING", "RUNNING")
    stage(root, folder, "ppo", points=5)
    export(root)
    (parent, child) = runs(look())
    assert (parent.info.status, child.info.status) == ("FINISHED", "FINISHED")
    history = look().get_metric_history(child.info.run_id, "ppo/kl")
    assert [point.step for point in history] == [1, 2, 3, 4, 5]


def test_a_running_stage_is_shown_as_running_and_sent_again(root: Path, look: Look) -> None:
    folder = pipeline(root)
    live = stage(root, folder, "ppo", points=2, end=None)
    export(root)
    assert [run.info.status for run in runs(look())] == ["RUNNING", "RUNNING"]
    assert record.pending(root), "and is not forgotten"
    live.end("FINISHED")
    export(root)
    assert [run.info.status for run in runs(look())] == ["FINISHED", "FINISHED"]


def test_models_datasets_and_tables(root: Path, look: Look) -> None:
    """Datasets have the hashes of DVC; the tables begin with what MLflow's view compares by."""
    whole(root)
    export(root)
    parent = runs(look())[0]
    models = {model.name: model for model in look().search_logged_models([parent.info.experiment_id])}
    assert set(models) == {"sft", "policy"}
    assert {metric.key: metric.value for metric in models["policy"].metrics} == {
        "gold": 3.0,
        "kl": 2.5,
        "win_rate": 0.8,
    }
    assert {(metric.dataset_name, metric.dataset_digest) for metric in models["policy"].metrics} == {
        ("evaluation_prompts", "f" * 32)
    }
    assert [(one.dataset.name, one.dataset.digest) for one in parent.inputs.dataset_inputs] == [
        ("evaluation_prompts", "f" * 32)
    ]
    place = look().download_artifacts(parent.info.run_id, "evaluate_answers.json")
    assert json.loads(Path(place).read_text()) == {
        "columns": ["prompt", "policy", "sft"],
        "data": [["p", "policy", "sft"]],
    }
    place = look().download_artifacts(parent.info.run_id, "evaluate_samples.json")
    assert json.loads(Path(place).read_text())["data"] == [["Hi", "p", "s"]]
    child = next(run for run in runs(look()) if run.data.tags.get("leash.stage") == "evaluate")
    assert "data" not in {one.path for one in look().list_artifacts(child.info.run_id)}, "all rows of the data"
    assert EVALUATION["win_rate"] == parent.data.metrics["win_rate"], "not that of the last model"


def test_the_policy_is_registered_and_a_trial_does_not_move_its_alias(root: Path, look: Look) -> None:
    evaluate(root, pipeline(root), "1" * 32)
    export(root)
    evaluate(root, pipeline(root, "b" * 64, study="betas", experiment="betas-1"), "2" * 32, "d" * 64)
    export(root)
    client, name = look(), "a-repository-policy"
    assert {str(one.version): one.source.partition("&")[0] for one in client.search_model_versions()} == {
        "1": f"dvc://models/policy?md5={'1' * 32}", "2": f"dvc://models/policy?md5={'2' * 32}"}  # fmt: skip
    assert str(client.get_model_version_by_alias(name, "current").version) == "1"
    evaluate(root, pipeline(root, "c" * 64), "3" * 32, "c" * 64)
    export(root)
    assert str(client.get_model_version_by_alias(name, "current").version) == "3"
    study, trial = (next(run for run in runs(client) if run.info.run_name == one) for one in ("betas", "betas-1"))
    assert trial.data.tags["mlflow.parentRunId"] == study.info.run_id


def test_a_study_whose_process_died_is_killed_and_does_not_wait_for_ever(root: Path, look: Look) -> None:
    with patch.object(sync, "sync"):
        sync.record_study(root, "betas 1")
    [folder] = record.pending(root, settings.uri_mark(settings.tracking_uri(root)))
    facts = record.read(folder / record.RUN)
    export(root)
    (study,) = runs(look())
    assert study.info.status == "RUNNING"
    record.write(folder / record.RUN, facts | {"born": 1.0})
    export(root)
    (study,) = runs(look())
    assert (study.info.status, study.info.run_name) == ("KILLED", "betas")
    assert not record.pending(root, settings.uri_mark(settings.tracking_uri(root)))


def test_two_projects_on_one_server_do_not_touch_each_other(root: Path, tmp_path: Path, look: Look) -> None:
    other = tmp_path / "another"
    other.mkdir()
    evaluate(root, pipeline(root), "1" * 32)
    evaluate(other, pipeline(other), "2" * 32)
    export(root)
    export(other, f"sqlite:///{root}/mlflow.db")
    assert {one.name for one in look().search_registered_models()} == {"a-repository-policy", "another-policy"}
    assert [len(runs(look(), name)) for name in ("a-repository", "another")] == [2, 2]
    for name in ("a-repository-policy", "another-policy"):
        assert str(look().get_model_version_by_alias(name, "current").version) == "1"


def test_the_variables_of_mlflow_win(
    root: Path, tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = tmp_path / "registry.db"
    registry.write_bytes(empty_database.read_bytes())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "team")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"sqlite:///{registry}")
    evaluate(root, pipeline(root))
    export(root)
    client = MlflowClient(f"sqlite:///{root}/mlflow.db", f"sqlite:///{registry}")
    assert len(runs(client, "team")) == 2
    assert [one.name for one in client.search_registered_models()] == ["a-repository-policy"]
    assert not MlflowClient(f"sqlite:///{root}/mlflow.db", f"sqlite:///{root}/mlflow.db").search_registered_models()


def test_a_description_that_somebody_wrote_stays(root: Path, look: Look) -> None:
    folder = whole(root)
    export(root)
    look().set_tag(runs(look())[0].info.run_id, "mlflow.note.content", "mine")
    whole(root)
    evaluate(root, folder)
    export(root)
    assert runs(look())[0].data.tags["mlflow.note.content"] == "mine"


def test_a_database_that_cannot_be_written_keeps_everything(root: Path) -> None:
    whole(root)
    (root / "mlflow.db").write_bytes(b"not a database" * 100)
    with pytest.raises(Unreachable):
        export(root)
    assert len(record.pending(root)) == 1
