"""A full disk: at the n-th write through the one place that makes files durable, in the libraries' own words, and on a
small file system that really is full. One line, exit code 2, nothing lost; with room again, the same bytes."""

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rlhf_core import files

if TYPE_CHECKING:
    from tests.conftest import Ended, Project, TinyRun

    Main = Callable[[Project, str], Ended]

WRITES = {"base": 20, "sft": 60, "preferences": 6, "reward": 30, "ppo": 24, "evaluate": 4, "rejection_sft": 12}
"""Flushes to the disk in the tiny run of a stage with a checkpoint a step, or less."""
FULL = "no space left on the device ("


def a_checkpoint_a_step(project: "Project") -> None:
    project.set("runtime.tracking", False)
    project.set("runtime.checkpoint_every", 1)


@pytest.mark.slow
@pytest.mark.chosen("preferences", "reward", "ppo")
@pytest.mark.parametrize("stage", WRITES)
def test_full_at_a_write_chosen_by_seed(
    tiny_run: "TinyRun", finished: "Project", stage_main: "Main", monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    a_checkpoint_a_step(finished)
    (finished.root / f"metrics/{stage}.json").write_text("{}", encoding="utf-8")
    before, left = finished.outputs(), random.Random(stage).randint(1, WRITES[stage])
    fsync = os.fsync

    def full(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        ended = stage_main(finished, stage)
    assert left <= 0, "the write never came"
    assert ended.code == 2
    assert ended.stderr.splitlines()[-1].startswith(f"{stage}: {FULL}")
    assert finished.outputs() == before, "the outs of an earlier run"
    assert not [path for path in finished.root.rglob("*.partial") if "work" not in path.parts]

    for name in [name for name in before if name.startswith(f"models/{stage}/")]:
        (finished.root / name).unlink()
    assert stage_main(finished, stage).code == 0
    assert finished.outputs() == tiny_run.project.outputs()


REFUSAL = """
import errno, os, sys

def refuse(event, details):
    if event == "open" and ".partial" in str(details[0]) and details[2] & os.O_WRONLY:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), details[0])

sys.addaudithook(refuse)
"""


def test_no_file_can_be_begun(finished: "Project", tmp_path: Path) -> None:
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks/sitecustomize.py").write_text(REFUSAL, encoding="utf-8")
    finished.set("runtime.tracking", False)
    before = finished.outputs()
    ended = finished.stage("ingest", PYTHONPATH=str(tmp_path / "hooks"))
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert ended.stderr.startswith(f"ingest: {FULL}")
    assert finished.outputs() == before


ON_A_SMALL_DISK = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -m tasks "$3"'
ALLOWED = ["unshare", "--user", "--map-root-user", "--mount"]


def on_a_small_disk(project: "Project", folder: str, stage: str) -> "subprocess.CompletedProcess[str]":
    """The stage, with a file system of 64 KiB mounted over a folder, in a namespace of its own."""
    words = ["sh", "-c", ON_A_SMALL_DISK, "sh", str(project.root / folder), sys.executable, stage]
    return project.run(*ALLOWED, *words)


def may_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    words = ["sh", "-c", 'mount -t tmpfs tmpfs "$1"', "sh", str(folder)]
    return subprocess.run([*ALLOWED, *words], check=False, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "folder"), [("base", "models"), ("ingest", "data/ingest"), ("ppo", "work")])
def test_a_disk_that_is_really_full(
    tiny_run: "TinyRun", finished: "Project", stage_main: "Main", tmp_path: Path, stage: str, folder: str
) -> None:
    """Libraries that write from Rust and C++ word it in their own way."""
    if not may_mount(tmp_path):
        pytest.skip("this system lets no user mount a file system of their own (unshare --user --mount)")
    a_checkpoint_a_step(finished)
    if stage == "ppo":
        (finished.root / "work").mkdir(exist_ok=True)
    ended = on_a_small_disk(finished, folder, stage)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(f"{stage}: {FULL}")
    assert finished.outputs() == tiny_run.project.outputs(), "what the small disk hid is as it was"
    assert stage_main(finished, stage).code == 0
    assert finished.outputs() == tiny_run.project.outputs()
