"""The state of a stage is removed when DVC has recorded its outputs, not before."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.stage.state import FINISHED

ROOT = Path(__file__).resolve().parents[3]
GRAPH = """
stages:
  toy:
    cmd: python code.py toy
    deps: [code.py]
    params: [toy]
    outs: [out.txt]
  next:
    cmd: python code.py next
    deps: [code.py, out.txt]
    outs: [next.txt]
"""
PARAMS = "threads: 1\nseed: 1\nlong_rows: refuse\nruntime: {tracking: false}\ntoy: {word: hello}\nnext: {word: bye}\n"
CODE = """
import os, sys, psutil
from rlhf_core.config.block import Block
from tasks.stage.run import run

class Toy(Block):
    word: str

def execute(stage):
    checkpoint = stage.state_dir / "checkpoint"
    if "LEASH_TEST_KILL_DVC" in os.environ:
        next(process for process in psutil.Process().parents() if "dvc" in process.cmdline()).kill()
    print("continued" if checkpoint.exists() else "trained", flush=True)
    checkpoint.write_text("kept")
    stage.out({"toy": "out.txt", "next": "next.txt"}[stage.name]).write_text(stage.params.word, encoding="utf-8")

run(sys.argv[1], Toy, lambda: execute)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A DVC project outside git, with two stages."""
    files = {".dvc/config": "[core]\n    no_scm = true\n    analytics = false\n", "dvc.yaml": GRAPH}
    for name, text in (files | {"params.yaml": PARAMS, "code.py": CODE}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def repro(toy: Path, *words: str, **more: str) -> tuple[int, str]:
    """(exit status, what the stage printed), once every process that prints has ended."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, "-m", "dvc", "repro", "--single-item", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path} | more
    done = subprocess.run(command, cwd=toy, env=environment, capture_output=True, text=True, check=False)
    printed = [word for word in ("continued", "trained") if word in done.stdout.splitlines()]
    return done.returncode, " ".join(printed)


def states(toy: Path, stage: str = "toy") -> list[list[str]]:
    return [sorted(path.name for path in folder.iterdir()) for folder in (toy / "work" / stage).glob("*")]


def test_the_state_is_removed_when_the_next_stage_begins(toy: Path) -> None:
    assert repro(toy, "toy") == (0, "trained")
    assert states(toy) == [["checkpoint", FINISHED]]
    assert repro(toy, "next") == (0, "trained")
    assert states(toy) == []
    assert states(toy, "next") == [["checkpoint", FINISHED]]


def test_a_recorded_stage_that_is_forced_starts_from_nothing(toy: Path) -> None:
    assert repro(toy, "toy") == (0, "trained")
    assert repro(toy, "--force", "toy") == (0, "trained")


@pytest.mark.slow
def test_a_stage_whose_outputs_dvc_could_not_store_continues(toy: Path) -> None:
    """A full disk, a kill: here a file where the cache must be."""
    (toy / ".dvc" / "cache").write_text("in the way", encoding="utf-8")
    code, printed = repro(toy, "toy")
    assert (code != 0, printed) == (True, "trained")
    (toy / ".dvc" / "cache").unlink()
    assert repro(toy, "toy") == (0, "continued")
    assert repro(toy, "next") == (0, "trained")
    assert states(toy) == []


@pytest.mark.slow
def test_what_is_recorded_and_in_no_cache_continues(toy: Path) -> None:
    """As in a fresh clone, whose dvc.lock is committed."""
    assert repro(toy, "toy") == (0, "trained")
    assert repro(toy, "next") == (0, "trained")
    shutil.rmtree(toy / ".dvc" / "cache")
    (toy / "out.txt").unlink()
    assert repro(toy, "toy", LEASH_TEST_KILL_DVC="1") == (-9, "trained")
    assert states(toy) == [["checkpoint", FINISHED]]
    (toy / "out.txt").unlink()
    assert repro(toy, "toy") == (0, "continued")


def test_without_dvc_the_state_is_removed_at_once(toy: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "code.py", "toy"], cwd=toy, env=environment, check=True)
    assert states(toy) == []
