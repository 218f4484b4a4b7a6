"""The contents of MLflow after a stage or a pipeline run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2
from mlflow.tracking import MlflowClient

from tasks.tracking import outbox, settings
from tasks.tracking.sender import drain
from tasks.tracking.tracker import PipelineIdentity, PipelineTracker, Tracker

Look = Callable[[], MlflowClient]
KEY = "ab" * 32


def stage(root: Path, pipeline: PipelineIdentity, name: str = "ppo", key: str = KEY) -> Tracker:
    return Tracker.open(root, name, key, pipeline, send=False, system_seconds=0)


def all_runs(client: MlflowClient) -> dict[str, list[Any]]:
    found = client.search_runs([client.get_experiment_by_name("leash").experiment_id])
    return {
        "parents": [run for run in found if "leash.stage" not in run.data.tags],
        "children": [run for run in found if "leash.stage" in run.data.tags],
    }


def test_the_parent_holds_parameters_tags_and_headline(root: Path, pipeline: PipelineIdentity, look: Look) -> None:
    tracker = stage(root, pipeline)
    tracker.headline({"evaluate/win_rate": 0.8, "evaluate/gold": None})
    tracker.close("FINISHED")
    again = stage(root, pipeline, "evaluate", "cd" * 32)
    for _ in range(2):
        again.headline({"evaluate/win_rate": 0.9})
        time.sleep(0.005)
    again.close_parent("FINISHED")
    again.close("FINISHED")
    drain(root)
    found = all_runs(look())
    (parent,) = found["parents"]
    assert parent.info.run_name == "c0ffee+ seed 1"
    assert parent.info.status == "FINISHED"
    assert parent.data.params == {
        "seed": "1",
        "ppo.kl.coef": "0.1",
        "ppo.kl.controller": "fixed",
        "ppo.clip_ratio": "0.2",
    }
    assert parent.data.metrics == {"evaluate/win_rate": 0.9}
    history = look().get_metric_history(parent.info.run_id, "evaluate/win_rate")
    assert [metric.value for metric in history] == [0.8, 0.9]
    assert parent.data.tags["leash.commit"] == "c0ffee"
    assert parent.data.tags["leash.dirty"] == "true"
    assert {run.info.run_name for run in found["children"]} == {"ppo", "evaluate"}
    assert {run.data.tags["mlflow.parentRunId"] for run in found["children"]} == {parent.info.run_id}
    assert {run.data.tags["leash.stage_key"] for run in found["children"]} == {KEY, "cd" * 32}


def test_another_pipeline_key_is_another_parent(root: Path, pipeline: PipelineIdentity, look: Look) -> None:
    stage(root, pipeline).close("FINISHED")
    other = replace(pipeline, key="f" * 64, params={"ppo": {"kl": {"coef": 0.2}}})
    stage(root, other, key="cd" * 32).close("FINISHED")
    drain(root)
    coefficients = {run.data.params["ppo.kl.coef"] for run in all_runs(look())["parents"]}
    assert coefficients == {"0.1", "0.2"}


def test_an_unfinished_run_of_the_key_continues_and_a_finished_one_does_not(
    root: Path, pipeline: PipelineIdentity, look: Look
) -> None:
    for status in ("FAILED", "FINISHED", "FINISHED"):
        tracker = stage(root, pipeline)
        tracker.params({"lr": 0.1})
        tracker.metrics({"kl": 1.0}, step=1)
        tracker.close(status)
        drain(root)
    found = all_runs(look())["children"]
    assert len(found) == 2
    assert [run.info.status for run in found] == ["FINISHED", "FINISHED"]
    assert sorted(run.data.tags.get("leash.restarts", "0") for run in found) == ["0", "1"]
    assert [len(look().get_metric_history(run.info.run_id, "kl")) for run in found] == [1, 1]


def test_a_finished_run_continues_if_its_outputs_were_not_recorded(
    root: Path, pipeline: PipelineIdentity, look: Look
) -> None:
    for step, continues in ((1, False), (2, True)):
        tracker = Tracker.open(root, "ppo", "ab" * 32, pipeline, send=False, system_seconds=0, continues=continues)
        tracker.metrics({"ppo/kl": 1.0}, step=step)
        tracker.close("FINISHED")
    drain(root)
    (run,) = all_runs(look())["children"]
    assert (run.info.status, run.data.tags["leash.restarts"]) == ("FINISHED", "1")


def test_the_run_of_another_checkout_is_left_alone(
    root: Path, pipeline: PipelineIdentity, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = stage(root, pipeline)
    drain(root)
    monkeypatch.setattr(settings, "workspace_id", lambda root: "elsewhere")
    (folder,) = outbox.pending(root)
    hidden = folder.rename(root / "hidden")  # that checkout has an outbox of its own
    stage(root, pipeline).close("FINISHED")
    drain(root)
    found = all_runs(look())
    assert sorted(run.info.status for run in found["children"]) == ["FINISHED", "RUNNING"]
    assert len(found["parents"]) == 2
    hidden.rename(folder)
    alive.close("FINISHED")


def test_a_run_left_running_is_killed_before_it_continues(
    root: Path, pipeline: PipelineIdentity, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = stage(root, pipeline)
    drain(root)
    dead._outbox.close()
    (folder,) = outbox.pending(root)
    outbox.remove(folder)  # its outcome is lost
    (run,) = all_runs(look())["children"]
    assert run.info.status == "RUNNING"

    seen: list[str] = []
    original = MlflowClient.set_terminated

    def note(self: MlflowClient, run_id: str, status: str | None = None, end_time: int | None = None) -> None:
        original(self, run_id, status, end_time)
        seen.append(f"{run_id} {self.get_run(run_id).info.status}")

    monkeypatch.setattr(MlflowClient, "set_terminated", note)
    stage(root, pipeline).close("FINISHED")
    drain(root)
    assert seen == [f"{run.info.run_id} KILLED", f"{run.info.run_id} FINISHED"]


def test_a_restored_stage_is_linked_to_the_run_that_made_it(root: Path, pipeline: PipelineIdentity, look: Look) -> None:
    stage(root, pipeline, "sft", "cd" * 32).close("FINISHED")
    tonight = PipelineTracker.open(root, replace(pipeline, key="f" * 64))
    tonight.link_restored("sft", "cd" * 32)
    tonight.link_restored("base", "ef" * 32)
    tonight.close_parent("FINISHED")
    tonight.close()
    drain(root)
    found = all_runs(look())
    (parent,) = [run for run in found["parents"] if run.data.tags["leash.pipeline_key"] == "f" * 64]
    assert parent.data.tags["leash.restored.sft"] == found["children"][0].info.run_id
    assert parent.data.tags["leash.restored.base"] == "untracked"
    assert parent.info.status == "FINISHED"


def test_a_late_close_does_not_end_a_pipeline_opened_since(
    root: Path, pipeline: PipelineIdentity, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000, 9000, 1000))
    monkeypatch.setattr(outbox, "now_ms", lambda: next(clock))
    early = PipelineTracker.open(root, pipeline)
    early.close_parent("FAILED")
    early.close()
    (first,) = outbox.pending(root)
    late = stage(root, pipeline)
    hidden = first.rename(root / "hidden")
    drain(root)
    hidden.rename(first)
    drain(root)
    assert all_runs(look())["parents"][0].info.status == "RUNNING"
    late.close_parent("FINISHED")
    late.close("FINISHED")
    drain(root)
    assert all_runs(look())["parents"][0].info.status == "FINISHED"


def test_a_flow_that_dies_leaves_its_pipeline_killed(root: Path, pipeline: PipelineIdentity, look: Look) -> None:
    flow = PipelineTracker.open(root, pipeline)
    drain(root)
    assert all_runs(look())["parents"][0].info.status == "RUNNING"
    flow._outbox.close()  # as the kernel does for a dead process
    drain(root)
    assert all_runs(look())["parents"][0].info.status == "KILLED"


def test_a_policy_is_registered_once_and_current_follows(root: Path, pipeline: PipelineIdentity, look: Look) -> None:
    for md5 in ("a" * 32, "a" * 32, "b" * 32, "a" * 32):
        tracker = stage(root, pipeline, key=md5 * 2)
        tracker.register_policy(md5, {"win_rate": 0.8})
        tracker.close("FINISHED")
        drain(root)
    client = look()
    versions = {str(v.version): v.source for v in client.search_model_versions("name = 'leash-policy'")}
    project = urlencode({"project": root.resolve()})
    assert versions == {
        "1": f"dvc://models/policy?md5={'a' * 32}&{project}",
        "2": f"dvc://models/policy?md5={'b' * 32}&{project}",
    }
    current = client.get_model_version_by_alias("leash-policy", "current")
    assert str(current.version) == "1"
    (parent,) = all_runs(client)["parents"]
    report = f"runs:/{parent.info.run_id}/report/index.html"
    assert current.tags == {"win_rate": "0.8", "leash.commit": "c0ffee", "leash.report": report}
    assert current.run_id == parent.info.run_id
    page = f"#/experiments/{parent.info.experiment_id}/runs/{parent.info.run_id}"
    assert current.description.startswith("win_rate **0.8**\n\ncommit `c0ffee`")
    assert current.description.endswith(f"[run]({page}), [report]({page}/artifacts/report/index.html)")


def test_a_table_is_one_that_mlflow_itself_loads(
    root: Path, pipeline: PipelineIdentity, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    # load_table asks the global address as well as the client's; a server that ran in this process has set it
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
    tracker = stage(root, pipeline)
    tracker.table("samples", [{"prompt": "old", "gold": 0.0}])
    rows = [{"prompt": "Frühstück 🥣", "gold": 4.0}, {"prompt": "<script>", "gold": float("nan")}]
    tracker.table("samples", rows)
    tracker.close("FINISHED")
    drain(root)
    client = look()
    (run,) = all_runs(client)["children"]
    table = client.load_table(run.info.experiment_id, "samples.json", run_ids=[run.info.run_id])
    assert list(table.columns) == ["prompt", "gold"]
    assert table["prompt"].tolist() == ["Frühstück 🥣", "<script>"]
    assert table["gold"].isna().tolist() == [False, True]


def test_a_table_is_also_on_the_pipeline_run_with_conversations_as_text(
    root: Path, pipeline: PipelineIdentity, look: Look
) -> None:
    user, system = {"role": "user", "content": "Lunch?"}, {"role": "system", "content": "Be brief."}
    rows = [{"prompt_id": str(place), "gold": 1.0, "prompt": prompt, "policy": "Soup."} for place, prompt in
            enumerate(([user], [system, user]))]  # fmt: skip
    tracker = stage(root, pipeline, "evaluate")
    for _ in range(2):
        tracker.table("samples", rows, lead=("prompt", "policy"))
    tracker.close("FINISHED")
    drain(root)
    client = look()
    found = all_runs(client)
    for run in (*found["parents"], *found["children"]):
        assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "samples.json", "type": "table"}]
        place = client.download_artifacts(run.info.run_id, "samples.json", str(root))
        table = json.loads(Path(place).read_text(encoding="utf-8"))
        assert table["columns"] == ["prompt", "policy", "prompt_id", "gold"]
        assert [row[0] for row in table["data"]] == ["Lunch?", "system: Be brief.\nuser: Lunch?"]


def test_inputs_and_artifacts(root: Path, pipeline: PipelineIdentity, look: Look) -> None:
    report = root / "report"
    (report / "pictures").mkdir(parents=True)
    (report / "index.html").write_text("<p>", encoding="utf-8")
    (report / "pictures" / "kl.png").write_bytes(b"png")
    tracker = stage(root, pipeline)
    tracker.inputs("preferences", "data/preferences", "d" * 32 + ".dir")
    tracker.artifact(report, "report")
    tracker.tags({"leash.note": "first"})
    tracker.tags({"leash.note": "second"})
    (report / "index.html").write_text("changed later", encoding="utf-8")
    tracker.close("FINISHED")
    drain(root)
    client = look()
    (run,) = all_runs(client)["children"]
    (entry,) = run.inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("preferences", "d" * 32 + ".dir")
    assert {(tag.key, tag.value) for tag in entry.tags} == {("mlflow.data.context", "ppo")}
    assert run.data.tags["leash.note"] == "second"
    place = Path(client.download_artifacts(run.info.run_id, "report", str(root)))
    assert (place / "index.html").read_text(encoding="utf-8") == "<p>"
    assert (place / "pictures" / "kl.png").read_bytes() == b"png"


def test_the_curves_by_which_runs_are_compared_are_also_on_the_pipeline_run(
    root: Path, pipeline: PipelineIdentity, look: Look
) -> None:
    """Every step once, also when the stage is killed and continues, and when everything is sent twice."""
    for status, steps in (("FAILED", (1, 2)), ("FINISHED", (2, 3))):
        tracker = stage(root, pipeline)
        for step in steps:
            tracker.metrics({"ppo/kl": step / 10, "ppo/clip_fraction": 0.1}, step=step)
        tracker.close(status)
        send_twice(root)
    client = look()
    (parent,) = all_runs(client)["parents"]
    assert set(parent.data.metrics) == {"ppo/kl"}
    history = client.get_metric_history(parent.info.run_id, "ppo/kl")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]


def send_twice(root: Path) -> None:
    """Send the outbox, and again from its beginning: as after a crash before the position was saved."""
    (folder,) = outbox.pending(root)
    copy = root / "copy"
    shutil.copytree(folder, copy)
    drain(root)
    copy.rename(folder)
    drain(root)


def test_the_seconds_of_all_stages_are_summed(root: Path, pipeline: PipelineIdentity, look: Look) -> None:
    """A run that was stopped and goes on counts each stage once."""
    for seconds in ({"sft": 2.0, "ppo": 3.0}, {"ppo": 4.0}):
        tracker = PipelineTracker.open(root, pipeline)
        tracker.seconds(seconds)
        tracker.close_parent("FINISHED")
        tracker.close()
        send_twice(root)
    (parent,) = all_runs(look())["parents"]
    assert parent.data.metrics == {"seconds": 6.0}
    assert json.loads(parent.data.tags["leash.seconds"]) == {"sft": 2.0, "ppo": 4.0}


def test_the_pipeline_run_has_description_report_and_datasets(
    root: Path, pipeline: PipelineIdentity, look: Look
) -> None:
    page = root / "index.html"
    page.write_text("<p>", encoding="utf-8")
    tracker = stage(root, replace(pipeline, changes=("seed=1 (2)",)))
    drain(root)
    (parent,) = all_runs(look())["parents"]
    assert parent.data.tags["mlflow.note.content"].startswith("commit `c0ffee`; parameters changed since: `seed=1 (2)`")
    assert parent.data.tags["leash.changes"] == "seed=1 (2)"
    for _ in range(2):
        tracker.dataset("heldout", "data/ingest/heldout.jsonl", "d" * 32, "evaluation")
        tracker.describe({"win_rate": 0.875}, page)
    tracker.close("FINISHED")
    drain(root)
    client = look()
    parent = client.get_run(parent.info.run_id)
    note = parent.data.tags["mlflow.note.content"]
    assert note.startswith("win_rate **0.875**")
    assert note.endswith(f"/runs/{parent.info.run_id}/artifacts/report/index.html)")
    assert [file.path for file in client.list_artifacts(parent.info.run_id, "report")] == ["report/index.html"]
    (entry,) = parent.inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("heldout", "d" * 32)
    assert {(tag.key, tag.value) for tag in entry.tags} == {("mlflow.data.context", "evaluation")}
    (child,) = all_runs(client)["children"]
    assert not child.inputs.dataset_inputs
    assert not client.list_artifacts(child.info.run_id)


def test_a_description_that_somebody_wrote_stays(root: Path, pipeline: PipelineIdentity, look: Look) -> None:
    first = stage(root, pipeline)
    first.close("FINISHED")
    drain(root)
    (parent,) = all_runs(look())["parents"]
    look().set_tag(parent.info.run_id, "mlflow.note.content", "my own words")
    second = stage(root, pipeline, key="cd" * 32)
    second.describe({"win_rate": 0.9}, None)
    second.close("FINISHED")
    drain(root)
    assert look().get_run(parent.info.run_id).data.tags["mlflow.note.content"] == "my own words"


def logged(tracker: Tracker) -> None:
    tracker.model("sft", "model", {"gold": 1.0}, step=0)
    tracker.model("snapshot 4.5", "snapshot", {"gold": 2.0}, step=4)
    tracker.model("policy", "model", {"gold": 3.0, "win_rate": 0.8}, step=5, md5="e" * 32)
    tracker.register_policy("e" * 32, {"win_rate": 0.8})


def test_models_are_listed_once_with_their_metrics(root: Path, pipeline: PipelineIdentity, look: Look) -> None:
    tracker = stage(root, pipeline, "evaluate")
    logged(tracker)
    tracker.close("FINISHED")
    send_twice(root)
    client = look()
    found = all_runs(client)
    (parent,), (child,) = found["parents"], found["children"]
    ranked = client.search_logged_models(
        [parent.info.experiment_id], order_by=[{"field_name": "metrics.gold", "ascending": False}]
    )
    assert [one.name for one in ranked] == ["policy", "snapshot 4_5", "sft"]
    assert {(metric.key, metric.value) for metric in ranked[0].metrics} == {("gold", 3.0), ("win_rate", 0.8)}
    assert {one.source_run_id for one in ranked} == {parent.info.run_id}
    assert {str(one.status) for one in ranked} == {"READY"}
    assert ranked[0].tags["leash.md5"] == "e" * 32
    assert ranked[0].model_type == "model"
    assert child.data.metrics == {"gold": 3.0, "win_rate": 0.8}  # the policy's, which came last
    assert not parent.data.metrics
    assert {one.model_id for one in parent.outputs.model_outputs} == {one.model_id for one in ranked}
    version = client.get_model_version_by_alias("leash-policy", "current")
    assert json.loads(ranked[0].tags["mlflow.modelVersions"]) == [
        {"name": "leash-policy", "version": str(version.version)}
    ]


@pytest.mark.parametrize("code", ["ENDPOINT_NOT_FOUND", "PERMISSION_DENIED"])
def test_a_server_without_models_gets_all_the_rest(
    root: Path, pipeline: PipelineIdentity, look: Look, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MlflowException("no such endpoint", getattr(databricks_pb2, code))

    for name in ("search_logged_models", "create_logged_model", "create_registered_model"):
        monkeypatch.setattr(MlflowClient, name, refuse)
    tracker = stage(root, pipeline, "evaluate")
    logged(tracker)
    tracker.figures({"prompts": 400.0})
    tracker.close("FINISHED")
    warnings: list[str] = []
    assert drain(root, warn=warnings.append).left == 0
    (run,) = all_runs(look())["children"]
    assert run.data.metrics == {"prompts": 400.0}
    assert run.info.status == "FINISHED"
    assert warnings[0] == "tracking: MLflow refused a model event (no such endpoint); left out"
