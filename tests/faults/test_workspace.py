"""Two drivers at once on one workspace, and what dead ones left behind: right outs, the right lock, one clear line."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from flows.commands.doctor import examine
from flows.graph import read_graph
from flows.pipeline import pipeline
from flows.stages import PipelineFailed
from rlhf_core.errors import UserError
from rlhf_core.locks import FileLock
from tests.conftest import RECORDED
from tests.faults.conftest import log_of, until

if TYPE_CHECKING:
    from tests.conftest import Project

Toy = Callable[..., Path]
Leash = Callable[..., Any]
STAGES: dict[str, tuple[str, list[str]]] = {"one": ("wait", []), "two": ("work", ["one"])}
RIGHT = ["one begin", "one end", "two begin", "two end"]


def dvc(root: Path) -> "subprocess.Popen[str]":
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro"], cwd=root, env=os.environ | {"PATH": path}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_the_second_leash_run_is_refused_at_once(toy: Toy, leash: Leash, prefect_api: str) -> None:
    root = toy(STAGES)
    first = leash(root, "run", api=prefect_api)
    until(lambda: "one begin" in log_of(root))
    second = leash(root, "run")
    printed, errors = second.communicate(timeout=60)
    assert (second.returncode, printed) == (2, "")
    assert errors.startswith(f"error: another leash run works in this folder (process {first.pid}, user ")
    assert errors.count("\n") == 1
    (root / "go").touch()
    assert first.communicate(timeout=60)[1] == ""
    assert first.returncode == 0
    assert log_of(root) == RIGHT


def test_leash_run_beside_dvc_repro(toy: Toy, prefect_api: str) -> None:
    root = toy(STAGES)
    other = dvc(root)
    until(lambda: "one begin" in log_of(root))
    with pytest.raises(PipelineFailed) as caught:
        pipeline(root=str(root), retries=2, retry_delay_seconds=60.0)
    assert caught.value.is_user_error, "it would be tried again"
    (message,) = map(str, caught.value.errors)
    assert message.startswith(f"one: another process works on one.out (PID {other.pid}, dvc repro); wait for its end")
    (root / "go").touch()
    other.communicate(timeout=60)
    assert other.returncode == 0
    lock = (root / "dvc.lock").read_bytes()
    assert {stage: outcome.state for stage, outcome in pipeline(root=str(root)).items()} == {
        "one": "UpToDate",
        "two": "UpToDate",
    }
    assert log_of(root) == RIGHT
    assert (root / "dvc.lock").read_bytes() == lock


def test_two_dvc_repro(toy: Toy) -> None:
    root = toy(STAGES)
    first = dvc(root)
    until(lambda: "one begin" in log_of(root))
    second = dvc(root)
    printed, _ = second.communicate(timeout=60)
    assert second.returncode != 0
    assert "'one': " in printed
    assert "is busy, it is being blocked by:" in printed
    assert f"(PID {first.pid})" in printed
    (root / "go").touch()
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert log_of(root) == RIGHT


@pytest.fixture
def stranger() -> Iterator[int]:
    """A living process that has nothing to do with DVC."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def unburied() -> Iterator[int]:
    """A zombie: a dead process that was not waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    yield process.pid
    process.wait()


@pytest.fixture
def blocked(toy: Toy, serial: Any) -> Callable[[int], Path]:
    """Makes a finished project with a missing output, and locks of the process with this number."""

    def make(pid: int) -> Path:
        root = toy({"one": ("work", []), "two": ("work", ["one"])})
        serial(root)
        temporary = root / ".dvc" / "tmp"
        for name in ("lock", "rwlock.lock"):
            (temporary / name).write_text(f" {pid}\n")
        (root / "work").mkdir()
        for name in ("mlflow.lock", "driver.lock"):
            (root / "work" / name).write_text(json.dumps({"pid": pid, "started": 1.0}))
        entry = {"pid": pid, "cmd": "/somewhere/bin/dvc repro"}
        listed = {"write": {str(root / "one.out"): entry}, "read": {str(root / "input.txt"): [entry]}}
        (temporary / "rwlock").write_text(json.dumps(listed))
        (finding,) = [check for check in examine(root) if check.name == "locks"]
        assert str(pid) in finding.found
        assert "rm .dvc/tmp/rwlock" in finding.advice
        (root / "one.out").unlink()
        return root

    return make


def test_dvc_itself_removes_the_locks_of_a_killed_process(blocked: Callable[[int], Path], prefect_api: str) -> None:
    root = blocked(2**22 - 3)
    assert pipeline(root=str(root))["one"].state == "Restored"
    assert FileLock(root / "work" / "mlflow.lock").acquire()


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["stranger", "unburied"])
def test_a_zombie_or_a_reused_number_is_one_line_with_the_command_that_helps(
    owner: str, request: pytest.FixtureRequest, blocked: Callable[[int], Path], prefect_api: str
) -> None:
    root = blocked(request.getfixturevalue(owner))
    with pytest.raises(PipelineFailed) as caught:
        pipeline(root=str(root), retry_delay_seconds=60.0)
    assert caught.value.is_user_error
    assert str(caught.value).endswith("rm .dvc/tmp/rwlock")
    (root / ".dvc" / "tmp" / "rwlock").unlink()
    assert pipeline(root=str(root))["one"].state == "Restored"


@pytest.mark.slow
def test_a_list_that_was_being_written(toy: Toy, serial: Any, prefect_api: str) -> None:
    root = toy({"one": ("work", [])})
    serial(root)
    (root / ".dvc" / "tmp" / "rwlock").write_text('{"write": {"/some')
    (finding,) = [check for check in examine(root) if check.name == "locks"]
    assert finding.found == ".dvc/tmp/rwlock is half-written: DVC stops at it"
    (root / "one.out").unlink()
    with pytest.raises(PipelineFailed, match=r"DVC cannot read \.dvc/tmp/rwlock; remove it and run again") as caught:
        pipeline(root=str(root))
    assert caught.value.is_user_error


@pytest.mark.slow
@pytest.mark.chosen("<<<<<<< HEAD\\n", "\\udc80")
@pytest.mark.parametrize(
    "damage", ["", "<<<<<<< HEAD\n", "[1, 2]\n", "schema: '2.0'\nstages:\n  one:\n    cm", "\udc80"]
)
def test_a_broken_lock_file(damage: str, toy: Toy) -> None:
    root = toy({"one": ("work", [])})
    (root / "dvc.lock").write_bytes(damage.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"^dvc.lock is broken \(.*\); `git checkout dvc.lock` brings back") as caught:
        read_graph(root)
    assert "\n" not in str(caught.value)
    (finding,) = [check for check in examine(root) if check.name == "dvc"]
    assert finding.verdict == "BROKEN"
    assert "git checkout dvc.lock" in finding.advice


@pytest.mark.slow
@pytest.mark.parametrize("driver_name", ["dvc", "leash"])
def test_outputs_deleted_or_edited_by_hand(driver_name: str, finished: "Project", prefect_api: str) -> None:
    """They come back, byte for byte, from the cache: nothing is trained again."""
    before, root = finished.outputs(), finished.root
    (root / "models" / "policy" / "extra.txt").write_text("extra")
    with (root / "models" / "sft" / "model.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x7f")
    (root / "metrics" / "ppo.json").write_text("{}")
    for name in ("report", "models/reward"):
        shutil.rmtree(root / name)
    (root / "models" / "reward").write_text("a file in place of a folder")
    (root / "data" / "ingest" / "heldout.jsonl").unlink()
    (root / "data" / "ingest" / "heldout.jsonl").mkdir()
    if driver_name == "dvc":
        assert finished.repro() == []
    else:
        done = finished.run(sys.executable, "-m", "flows.cli", "run", PREFECT_API_URL=prefect_api, **RECORDED)
        assert done.returncode == 0, done.stdout + done.stderr
        table = [line.split() for line in done.stdout.partition("stage ")[2].splitlines()]
        assert [row[0] for row in table if row[1:2] == ["restored"]] == [
            "ingest",
            "sft",
            "reward",
            "ppo",
            "select",
            "report",
        ]
        assert [row[0] for row in table if row[1:2] == ["ran"]] == []
    assert finished.outputs() == before
