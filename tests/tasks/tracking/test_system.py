"""System metrics of a stage, sampled by another process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from mlflow.tracking import MlflowClient

from tasks.tracking import outbox, system
from tasks.tracking.outbox import Appender, Outbox, read_events
from tasks.tracking.sender import drain
from tasks.tracking.system import SystemMetrics, gpus, sample
from tasks.tracking.tracker import PipelineIdentity, Tracker

NVIDIA_SMI = """#!/bin/sh
echo "0, 87, 40960, 81920, 512.25"
echo "1, [N/A], 0, 81920, [N/A]"
"""


def test_a_sample_has_the_names_of_mlflows_tab() -> None:
    found = sample(psutil.Process())
    assert {"cpu_utilization_percentage", "system_memory_usage_megabytes", "system_memory_usage_percentage"} < set(
        found
    )
    assert found["process_memory_megabytes"] > 10


def test_each_gpu_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that prints what nvidia-smi prints stands in for it."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI, encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus() == {
        "gpu_0_utilization_percentage": 87.0,
        "gpu_0_memory_usage_megabytes": pytest.approx(42949.67296),
        "gpu_0_memory_usage_percentage": 50.0,
        "gpu_0_power_usage_watts": 512.25,
        "gpu_1_memory_usage_megabytes": 0.0,
        "gpu_1_memory_usage_percentage": 0.0,
    }


@pytest.mark.parametrize("script", [None, "#!/bin/sh\nexit 9\n", "#!/bin/sh\nsleep 60\n"])
def test_without_an_answer_there_are_no_gpus(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "GPU_SECONDS", 0.2)
    if script:
        (tmp_path / "nvidia-smi").write_text(script, encoding="utf-8")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    assert gpus() == {}


def test_sampling_ends_with_the_process_or_when_stopped() -> None:
    found: list[int] = []
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    dies = SystemMetrics(lambda _, step: found.append(step), process.pid, 0.05)
    dies.start()
    deadline = time.monotonic() + 20
    while len(found) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    dies.join(timeout=20)
    assert not dies.is_alive()
    assert found == list(range(len(found)))
    stopped = SystemMetrics(lambda *_: None, psutil.Process().pid, 3600)
    stopped.start()
    stopped.stop()
    assert not stopped.is_alive()


def test_another_process_appends_to_the_outbox_of_a_stage(tmp_path: Path) -> None:
    box = Outbox.create(tmp_path, "sft-key", pytest.fail)
    appender = Appender(box.folder)
    box.append("tags", tags={})
    appender.metrics({"system/x": 1.0}, 0)
    box.append("tags", tags={})
    assert [event.kind for event in read_events(box.folder, 0)] == ["tags", "metrics", "tags"]
    box.close()
    outbox.remove(box.folder)
    appender.metrics({"system/x": 1.0}, 1)
    with pytest.raises(FileNotFoundError):
        Appender(box.folder)


def test_samples_are_numbered_across_the_processes_of_a_stage(root: Path, pipeline: PipelineIdentity) -> None:
    for status, samples in (("FAILED", 3), ("FINISHED", 2)):
        tracker = Tracker.open(root, "ppo", "ab" * 32, pipeline, send=False)
        appender = Appender(tracker._outbox.folder)
        for step in range(samples):
            appender.metrics({"system/cpu_utilization_percentage": 50.0}, step)
        tracker.close(status)
        drain(root)
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("leash").experiment_id], "tags.`leash.stage` = 'ppo'")
    history = client.get_metric_history(run.info.run_id, "system/cpu_utilization_percentage")
    assert [metric.step for metric in history] == list(range(5))
