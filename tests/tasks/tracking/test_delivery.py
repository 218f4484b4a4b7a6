"""Faults between a stage and MLflow: stages do not wait, no event is lost, no event arrives twice."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from rlhf_core.locks import FileLock
from tasks.tracking import outbox, runs, sender, settings
from tasks.tracking.outbox import State
from tasks.tracking.tracker import PipelineIdentity, Tracker

Look = Callable[[], MlflowClient]
PROJECT = Path(__file__).resolve().parents[3]
KEY = "ab" * 32


def children(client: MlflowClient) -> list[Any]:
    experiment = client.get_experiment_by_name("leash")
    found = client.search_runs([experiment.experiment_id]) if experiment else []
    return [run for run in found if "leash.stage" in run.data.tags]


def parents(client: MlflowClient) -> list[Any]:
    found = client.search_runs([client.get_experiment_by_name("leash").experiment_id])
    return [run for run in found if "leash.stage" not in run.data.tags]


def steps(client: MlflowClient, run: Any, key: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://somebody:hunter2@127.0.0.1:{probe.getsockname()[1]}"


def test_a_dead_server_is_reported_and_everything_stays(
    root: Path, pipeline: PipelineIdentity, closed_port: str
) -> None:
    tracker = Tracker.open(root, "ppo", KEY, pipeline, send=False)
    tracker.close("FINISHED")
    begin = time.monotonic()
    result = sender.drain(root, timeout=30, uri=closed_port)
    assert (result.sent, result.left, result.reason) == (0, 1, "Connection refused")
    assert time.monotonic() - begin < 5


@pytest.mark.slow
def test_the_sender_sends_while_the_stage_works_and_prints_nothing(
    root: Path, pipeline: PipelineIdentity, look: Look, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker.open(root, "sft", KEY, pipeline, system_seconds=0.2, sender_after=0)
    tracker.metrics({"sft/loss": 2.0}, step=1)
    client, deadline = look(), time.monotonic() + 20
    while not (found := children(client)) or not found[0].data.metrics.get("sft/loss"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert found[0].info.status == "RUNNING"
    tracker.metrics({"sft/loss": 1.0}, step=2)
    assert tracker.close("FINISHED", timeout=30)
    (run,) = children(client)
    assert run.info.status == "FINISHED"
    assert steps(client, run, "sft/loss") == [(1, 2.0), (2, 1.0)]
    assert run.data.metrics["system/system_memory_usage_megabytes"] > 0
    assert "system/cpu_utilization_percentage" in run.data.metrics
    assert capfd.readouterr() == ("", "")
    assert not list(outbox.outbox_folder(root).iterdir())


@pytest.mark.slow
def test_the_sender_sends_outboxes_of_earlier_stages(root: Path, pipeline: PipelineIdentity, look: Look) -> None:
    left = Tracker.open(root, "ingest", "cd" * 32, pipeline, send=False, system_seconds=0)
    left.metrics({"ingest/rows": 7.0}, step=0)
    left.close("FINISHED")
    tracker = Tracker.open(root, "sft", KEY, pipeline, system_seconds=0, sender_after=0)
    deadline = time.monotonic() + 20
    while len(outbox.pending(root)) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    tracker.close("FINISHED", timeout=30)
    found = {run.info.run_name: run for run in children(look())}
    assert found["ingest"].data.metrics == {"ingest/rows": 7.0}
    assert {run.info.status for run in found.values()} == {"FINISHED"}


def test_a_short_stage_starts_no_sender_and_leaves_its_events(
    root: Path, pipeline: PipelineIdentity, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    tracker = Tracker.open(root, "sft", KEY, pipeline)
    begin = time.monotonic()
    assert not tracker.close("FINISHED")
    assert time.monotonic() - begin < 2
    assert len(outbox.pending(root)) == 1
    assert capfd.readouterr() == ("", "")


def test_the_stage_that_ends_the_pipeline_run_sends_all_outboxes(
    root: Path, pipeline: PipelineIdentity, look: Look, capfd: pytest.CaptureFixture[str]
) -> None:
    Tracker.open(root, "ingest", "cd" * 32, pipeline, system_seconds=0).close("FINISHED")
    last = Tracker.open(root, "report", KEY, pipeline, system_seconds=0)
    last.close_parent("FINISHED")
    last.close("FINISHED")
    assert {run.info.status for run in children(look())} == {"FINISHED"}
    assert [run.info.status for run in parents(look())] == ["FINISHED"]
    assert not outbox.pending(root)
    assert capfd.readouterr() == ("", "")


def test_unsent_outboxes_of_the_last_stage_are_one_line(
    root: Path, pipeline: PipelineIdentity, closed_port: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Tracker.open(root, "ingest", "cd" * 32, pipeline, uri=closed_port, system_seconds=0).close("FINISHED")
    last = Tracker.open(root, "report", KEY, pipeline, uri=closed_port, system_seconds=0)
    last.close_parent("FINISHED")
    last.close("FINISHED")
    line = "tracking: 2 outboxes wait for MLflow (Connection refused); `leash sync` sends what is missing\n"
    assert capfd.readouterr() == ("", line)


def test_a_driver_sends_what_is_left_itself(
    root: Path, pipeline: PipelineIdentity, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(settings.OUTCOME_VARIABLE, str(root / "outcome"))
    last = Tracker.open(root, "report", KEY, pipeline, system_seconds=0)
    last.close_parent("FINISHED")
    last.close("FINISHED")
    assert len(outbox.pending(root)) == 1
    assert capfd.readouterr() == ("", "")


def test_a_crash_between_sending_and_saving_duplicates_nothing(
    root: Path, pipeline: PipelineIdentity, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker.open(root, "ppo", KEY, pipeline, send=False, system_seconds=0)
    for step in range(5):
        tracker.metrics({"ppo/kl": step, "ppo/nan": float("nan")}, step=step)
    tracker.headline({"kl_last": 4.0})
    tracker.register_policy("e" * 32, {"win_rate": 0.9})
    tracker.inputs("prompts", "data/prompts.jsonl", "f" * 32)
    tracker.table("samples", [{"prompt": "p"}])
    tracker.close("FINISHED")

    class Crash(BaseException):
        pass

    def crash(self: State, folder: Path) -> None:
        raise Crash

    saved, kinds = State.save, 8
    for survived in range(kinds):  # the sender dies after the first event, after the second, ...
        calls = iter(range(survived))
        monkeypatch.setattr(
            State,
            "save",
            lambda self, folder, calls=calls: (saved if next(calls, None) is not None else crash)(self, folder),
        )
        with pytest.raises(Crash):
            sender.drain(root)
        (folder,) = outbox.pending(root)
        (folder / outbox.STATE).unlink(missing_ok=True)  # the saved position is lost, too
    monkeypatch.setattr(State, "save", saved)
    assert sender.drain(root).left == 0

    client = look()
    (run,), (parent,) = children(client), parents(client)
    assert steps(client, run, "ppo/kl") == [(step, step) for step in range(5)]
    assert len(steps(client, run, "ppo/nan")) == 5
    assert steps(client, parent, "kl_last") == [(0, 4.0)]
    assert len(client.search_model_versions("name = 'leash-policy'")) == 1
    assert len(run.inputs.dataset_inputs) == 1
    assert run.data.tags["mlflow.loggedArtifacts"].count("samples.json") == 1
    assert "leash.restarts" not in run.data.tags


WORKER = """
import sys
from pathlib import Path
from tasks.tracking.tracker import PipelineIdentity, Tracker
pipeline = PipelineIdentity("p" * 64, {"seed": 1})
tracker = Tracker.open(Path(sys.argv[1]), sys.argv[2], sys.argv[3], pipeline, sender_after=0)
tracker.metrics({"loss": 1.0}, step=0)
print(tracker.close("FINISHED", timeout=60))
"""


@pytest.mark.slow
def test_two_stages_open_a_fresh_database_at_once(tmp_path: Path) -> None:
    workers = [start(WORKER, str(tmp_path), stage, key * 32) for stage, key in (("sft", "a1"), ("ingest", "b2"))]
    assert [worker.communicate(timeout=90) for worker in workers] == [("True\n", "")] * 2
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (parent,) = parents(client)
    assert sorted(run.info.run_name for run in children(client)) == ["ingest", "sft"]
    assert {run.data.tags["mlflow.parentRunId"] for run in children(client)} == {parent.info.run_id}
    assert (tmp_path / "mlartifacts").as_uri() in parent.info.artifact_uri


KILLED = """
import os, signal, sys, time
from pathlib import Path
from tasks.tracking.tracker import PipelineIdentity, Tracker
pipeline = PipelineIdentity("p" * 64, {"seed": 1})
tracker = Tracker.open(Path(sys.argv[1]), "ppo", "ab" * 32, pipeline, system_seconds=0.1, sender_after=0)
time.sleep(0.5)
for step in range(6):
    tracker.metrics({"ppo/kl": float(step)}, step=step)
tracker.params({"lr": 1})
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_stage_is_marked_and_its_run_continues(root: Path, look: Look) -> None:
    worker = start(KILLED, str(root))
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    client, deadline = look(), time.monotonic() + 30
    while not client.get_experiment_by_name("leash") or not children(client):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    (before,) = children(client)
    assert before.info.status == "RUNNING"
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    while outbox.pending(root):  # its sender outlives it by seconds
        assert time.monotonic() < deadline
        sender.drain(root, timeout=1)
    (dead,) = children(client)
    assert dead.info.status == "KILLED"

    again = Tracker.open(root, "ppo", KEY, PipelineIdentity("p" * 64, {"seed": 1}), send=False)
    for step in range(4, 8):  # from the checkpoint at step 4
        again.metrics({"ppo/kl": float(step)}, step=step)
    again.close("FINISHED")
    sender.drain(root)
    (after,) = children(client)
    assert after.info.run_id == before.info.run_id
    assert after.info.status == "FINISHED"
    assert after.data.tags["leash.restarts"] == "1"
    assert steps(client, after, "ppo/kl") == [(step, float(step)) for step in range(8)]
    system = [step for step, _ in steps(client, after, "system/cpu_utilization_percentage")]
    assert sorted(set(system)) == list(range(len(system)))
    assert len(system) > 2


def test_an_outbox_has_one_sender_and_outboxes_of_a_key_are_sent_in_order(
    root: Path, pipeline: PipelineIdentity, look: Look
) -> None:
    first = Tracker.open(root, "ppo", KEY, pipeline, send=False, system_seconds=0)
    first.metrics({"kl": 1.0}, step=1)
    first.close("FAILED")
    second = Tracker.open(root, "ppo", KEY, pipeline, send=False, system_seconds=0)
    second.metrics({"kl": 2.0}, step=2)
    second.close("FINISHED")
    older, newer = outbox.pending(root)
    held = FileLock(older / outbox.SENDER_LOCK)
    assert held.acquire()
    writer = runs.MlflowWriter(root, f"sqlite:///{root}/mlflow.db", print)
    assert not sender.deliver(root, older, writer, lambda: False)
    assert not sender.deliver(root, newer, writer, lambda: False)
    assert look().get_experiment_by_name("leash") is None
    held.release()
    assert sender.drain(root).sent == 2
    (run,) = children(look())
    assert [step for step, _ in steps(look(), run, "kl")] == [1, 2]


def test_a_refused_event_does_not_hold_up_the_others(root: Path, pipeline: PipelineIdentity, look: Look) -> None:
    said: list[str] = []
    tracker = Tracker.open(root, "ppo", KEY, pipeline, send=False, system_seconds=0)
    tracker.inputs("n" * 501, "data/x.jsonl", "d" * 32)
    tracker.metrics({"kl": 1.0}, step=1)
    tracker.close("FINISHED")
    assert sender.drain(root, warn=said.append).left == 0
    assert len(said) == 1
    assert "inputs" in said[0]
    (run,) = children(look())
    assert run.data.metrics == {"kl": 1.0}


def test_another_address_and_a_replaced_database_get_everything(
    root: Path, pipeline: PipelineIdentity, look: Look, empty_database: Path
) -> None:
    tracker = Tracker.open(root, "ppo", KEY, pipeline, send=False, system_seconds=0)
    tracker.metrics({"kl": 1.0}, step=1)
    sender.drain(root)  # the owner lives: sent as far as it goes, and kept
    (first,) = children(look())
    look().delete_experiment(first.info.experiment_id)
    other = root / "other.db"
    other.write_bytes(empty_database.read_bytes())
    tracker.metrics({"kl": 2.0}, step=2)
    tracker.close("FINISHED")
    assert sender.drain(root, uri=f"sqlite:///{other}").sent == 1
    client = MlflowClient(f"sqlite:///{other}")
    (run,) = children(client)
    assert steps(client, run, "kl") == [(1, 1.0), (2, 2.0)]
    assert parents(client)[0].data.params["ppo.kl.coef"] == "0.1"


def test_a_deleted_run_is_created_again(root: Path, pipeline: PipelineIdentity, look: Look) -> None:
    tracker = Tracker.open(root, "ppo", KEY, pipeline, send=False, system_seconds=0)
    tracker.metrics({"kl": 1.0}, step=1)
    sender.drain(root)
    (folder,) = outbox.pending(root)
    writer = runs.MlflowWriter(root, f"sqlite:///{root}/mlflow.db", print)
    state = State.load(folder, writer.uri_mark)
    state.run_id = "0" * 32
    state.save(folder)
    tracker.metrics({"kl": 2.0}, step=2)
    tracker.close("FINISHED")
    assert sender.drain(root).left == 0
    (run,) = children(look())
    assert steps(look(), run, "kl") == [(1, 1.0), (2, 2.0)]
