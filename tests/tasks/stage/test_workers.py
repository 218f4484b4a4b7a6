"""How many processes a stage has, and what it does when one of them fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tasks.stage.workers import requested_processes

ROOT = Path(__file__).parents[3]
PARAMS = """
ppo: {processes: 2}
rloo: {enabled: true}
grpo: {enabled: true, settings: {processes: 3}}
reinforce: {enabled: false}
dpo: {enabled: true}
"""


@pytest.mark.parametrize(
    ("stage", "count"), [("ppo", 2), ("rloo", 2), ("grpo", 3), ("reinforce", 2), ("dpo", 1), ("sft", 1)]
)
def test_ppo_and_its_variants_have_several_processes(stage: str, count: int) -> None:
    assert requested_processes(YAML(typ="safe").load(PARAMS), stage) == count


@pytest.mark.parametrize("text", ["ppo: 3", "rloo: 3", "ppo: {processes: many}", "sft: {}"])
def test_params_that_are_not_valid_are_left_to_the_stage(text: str) -> None:
    content = YAML(typ="safe").load(text)
    assert requested_processes(content, "ppo") == requested_processes(content, "rloo") == 1


STAGE = """
import os, sys, time
import torch
from torch import distributed
from pydantic import BaseModel
from rlhf_core.errors import UserError
from rlhf_core.training.processes import join_group
from tasks.stage import run as module, workers

def fails(*_):
    join_group()
    if workers.is_worker():
        raise UserError("rank 1 is short of memory")
    if sys.argv[1] == "hang":
        time.sleep(600)
    distributed.all_reduce(torch.ones(1))

workers.SECONDS_TO_END = 1.0
workers.subprocess.Popen = lambda words, _popen=workers.subprocess.Popen, **options: _popen(
    [sys.executable, __file__, sys.argv[1]], **options
)
workers.start_workers("toy", 2)
module._run = fails
module.run("toy", BaseModel, None)
"""


@pytest.mark.slow
@pytest.mark.chosen("hang")
@pytest.mark.parametrize("way", ["lost", "hang"])
def test_the_error_of_a_worker_is_the_error_of_the_stage(way: str, tmp_path: Path) -> None:
    """Whether rank 0 loses the connection to it or waits for it: one line and exit code 2."""
    script = tmp_path / "toy.py"
    script.write_text(STAGE, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, str(script), way],
        env=environment
        | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        | {"LEASH_OUTCOME": str(tmp_path / "outcome")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if "Warning" not in line]
    assert (done.returncode, lines) == (2, ["toy: rank 1 is short of memory"])
    assert not list(tmp_path.glob("leash-*"))
    outcome = json.loads((tmp_path / "outcome").read_text(encoding="utf-8"))
    assert (outcome["exit"], outcome["message"]) == (2, "rank 1 is short of memory"), "no crash to be tried again"


def test_a_training_that_is_off_needs_one_process() -> None:
    assert requested_processes({"sft": {"processes": 2, "enabled": False}}, "sft") == 1
