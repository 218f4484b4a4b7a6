"""A stage sees as many GPUs as it has processes. There is no GPU here: their names and device files are invented."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.stage.workers import limit_gpus, requested_processes, visible_gpus

PARAMS = """
ppo: {processes: 2}
rloo: {enabled: true}
grpo: {enabled: true, settings: {processes: 3}}
reinforce: {enabled: false}
dpo: {enabled: true}
"""


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "params.yaml"
    path.write_text(PARAMS, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("stage", "count"), [("ppo", 2), ("rloo", 2), ("grpo", 3), ("reinforce", 1), ("dpo", 1), ("sft", 1)]
)
def test_only_ppo_and_its_variants_have_several_processes(params: Path, stage: str, count: int) -> None:
    assert requested_processes(stage, params) == count


@pytest.mark.parametrize("text", ["ppo: 3", "rloo: 3", "ppo: {processes: many}", "- ppo", "ppo: [", "", "sft: {}"])
def test_params_that_are_not_valid_are_left_to_the_stage(params: Path, text: str) -> None:
    params.write_text(text, encoding="utf-8")
    assert requested_processes("ppo") == requested_processes("rloo") == 1


@pytest.mark.parametrize(
    ("stage", "before", "after"),
    [
        ("sft", "0,1,2,3", "0"),
        ("sft", "5,GPU-ab", "5"),
        ("ppo", "5,GPU-ab, 7", "5,GPU-ab"),
        ("grpo", "0,1", "0,1"),
        ("sft", "3", "3"),
        ("sft", "", ""),
        ("sft", "-1", "-1"),
        ("sft", "0,-1,1", "0,-1,1"),
    ],
)
def test_a_stage_gets_the_first_gpus(
    params: Path, monkeypatch: pytest.MonkeyPatch, stage: str, before: str, after: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    limit_gpus(stage)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == after


def test_ranks_keep_the_gpus_that_they_were_given(params: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("RANK", "0")
    limit_gpus("sft")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_without_a_list_the_device_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == []
    for name in ("nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "1"]


def test_the_process_of_a_stage_limits_its_gpus_before_torch_is_imported(params: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, sys\n"
        "atexit.register(lambda: print(os.environ['CUDA_VISIBLE_DEVICES'], 'torch' in sys.modules))\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0,1,2"}
    command = [sys.executable, "-m", "tasks.check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "0 False\n", done.stderr
