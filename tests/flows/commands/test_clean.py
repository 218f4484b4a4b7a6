"""`leash gc --work`: removes what dead runs have left, and keeps what a run needs or a living process holds."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dvc.repo import Repo
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.clean import Found, Leftover, find_leftovers, remove, render
from rlhf_core.locks import FileLock
from tasks.stage.dvc_files import open_project
from tasks.stage.state import FINISHED
from tests.tasks.tracking.conftest import pipeline, stage

PROJECT = Path(__file__).resolve().parents[3]
GRAPH = """
stages:
  one: {cmd: python worker.py, deps: [input.txt], outs: [one.out]}
  two: {cmd: python worker.py, deps: [one.out], outs: [two.out]}
"""
STALE = "0123456789abcdef"
HOLDER = """
import sys, time
from pathlib import Path
from rlhf_core.locks import FileLock

assert FileLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with two stages, and state in work/ of `one`: of its present key, and of another."""
    root = tmp_path / "toy"
    files = {".dvc/config": "[core]\n    no_scm = true\n    analytics = false\n", "dvc.yaml": GRAPH}
    for name, text in (files | {"params.yaml": "seed: 1\n", "input.txt": "1\n"}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    for place in (present(root, "one"), f"work/one/{STALE}"):
        (root / place).mkdir(parents=True)
        (root / place / "checkpoint").write_bytes(b"x" * 1000)
    return root


def present(root: Path, stage: str) -> str:
    with open_project(root) as project:
        definition = project.stage(stage)
        return f"work/{stage}/{definition.key({}, definition.hashes())[:16]}"


def paths(found: Found, root: Path) -> dict[str, str]:
    return {leftover.path.relative_to(root).as_posix(): leftover.why for leftover in found.leftovers}


def clean(root: Path, everything: bool = False) -> str:
    return remove(root, find_leftovers(root, everything).leftovers, everything)


def test_state_of_a_finished_stage_is_removed_once_it_is_recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    (root / "worker.py").write_text("open('one.out', 'w').write('1')", encoding="utf-8")
    state = root / present(root, "one")
    (state / FINISHED).touch()
    assert state.relative_to(root).as_posix() not in paths(find_leftovers(root, False), root), "it is not recorded"
    with Repo(str(root)) as repo:
        repo.reproduce("one")
    assert paths(find_leftovers(root, False), root)[state.relative_to(root).as_posix()] == "state of a finished stage"


def test_state_of_another_key_is_removed_and_of_the_current_one_stays(root: Path) -> None:
    found = find_leftovers(root, False)
    assert paths(found, root) == {f"work/one/{STALE}": "state of other parameters, code or data"}
    assert found.leftovers[0].size == 1000
    assert found.stays == [f"{present(root, 'one')}: the stage would continue from it; --all removes it"]
    assert clean(root) == "removed 1 things, 1.0 kB"
    assert (root / present(root, "one") / "checkpoint").exists()
    assert not (root / "work/one" / STALE).exists()


def test_everything_means_the_present_key_too(root: Path) -> None:
    assert clean(root, everything=True) == "removed 2 things, 2.0 kB"
    assert not (root / "work/one").exists()


def test_state_that_may_be_needed_stays(root: Path) -> None:
    (root / "work/two" / STALE).mkdir(parents=True)  # its input one.out was never made
    found = find_leftovers(root, False)
    assert f"work/two/{STALE}" not in paths(found, root)
    assert "one.out: file not found" in "".join(found.stays)
    assert f"work/two/{STALE}" in paths(find_leftovers(root, True), root)


def test_a_stage_that_was_removed_from_dvc_yaml(root: Path) -> None:
    (root / "work/gone" / STALE).mkdir(parents=True)
    for name in ("gone.lock", "one.lock", "mlflow.lock", "prefect-server.log"):
        (root / "work" / name).touch()
    found = paths(find_leftovers(root, False), root)
    assert found[f"work/gone/{STALE}"] == "dvc.yaml has no stage gone"
    assert set(found) == {f"work/one/{STALE}", f"work/gone/{STALE}", "work/gone.lock"}
    clean(root)
    left = {path.relative_to(root / "work").as_posix() for path in (root / "work").iterdir()}
    assert left - {"hashes.json"} == {"one", "one.lock", "mlflow.lock", "prefect-server.log"}


def test_half_written_outputs_go(root: Path) -> None:
    (root / ".two.out.partial").mkdir()
    (root / ".two.out.partial" / "weights").write_text("half", encoding="utf-8")
    (root / ".mine.partial").touch()  # beside no out of dvc.yaml
    assert paths(find_leftovers(root, False), root)[".two.out.partial"] == "half-written by a run that was stopped"
    clean(root)
    assert not (root / ".two.out.partial").exists()
    assert (root / ".mine.partial").exists()


@pytest.fixture
def held(root: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that runs the stage `one`, as far as locks can tell."""
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", HOLDER, str(root / "work/one.lock")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_nothing_of_a_stage_at_work_is_touched(root: Path, held: "subprocess.Popen[str]") -> None:
    (root / ".one.out.partial").touch()
    found = find_leftovers(root, True)
    assert paths(found, root) == {}
    assert found.stays == [f"one: process {held.pid} runs this stage; nothing of it is touched"]
    held.kill()
    held.wait()
    assert set(paths(find_leftovers(root, False), root)) == {f"work/one/{STALE}", ".one.out.partial"}


def test_a_clone_in_which_a_stage_has_outlived_its_maker_stays(root: Path) -> None:
    inside = root / "work/runs/verify-abc/tree/work"
    inside.mkdir(parents=True)
    lock = FileLock(inside / "sft.lock")
    assert lock.acquire()
    found = find_leftovers(root, True)
    assert f"work/runs/verify-abc: process {os.getpid()} works in this workspace" in found.stays
    assert "work/runs/verify-abc" not in paths(found, root)
    lock.release()
    assert paths(find_leftovers(root, False), root)["work/runs/verify-abc"] == "a workspace whose process died"
    clean(root)
    assert not (root / "work/runs/verify-abc").exists()


def test_a_stage_that_begins_between_the_question_and_the_answer(root: Path) -> None:
    agreed = find_leftovers(root, False).leftovers
    lock = FileLock(root / "work/one.lock")
    assert lock.acquire()
    assert remove(root, agreed, False).startswith("removed 0 things, 0 bytes; 1 stay: they are in use now")
    lock.release()
    edited = present(root, "one")
    shutil.rmtree(root / edited)
    (root / "work/one" / STALE).rename(root / edited)  # what was agreed on is no longer there
    assert remove(root, agreed, False).startswith("removed 0 things")
    assert (root / edited / "checkpoint").exists()


def test_what_has_become_the_present_key_meanwhile_stays(root: Path) -> None:
    agreed = [Leftover(root / present(root, "one"), "was that of another key when it was listed", "one")]
    assert remove(root, agreed, False).startswith("removed 0 things")
    assert agreed[0].path.exists()


def test_what_waits_for_mlflow_stays(root: Path) -> None:
    live = stage(root, pipeline(root), "one", points=2)
    found = find_leftovers(root, True)
    assert not [path for path in paths(found, root) if "tracking" in path]
    line = "stays: work/tracking: 1 runs are not all in MLflow; `leash run --sync` sends them"
    assert line in render(root, found).splitlines()
    clean(root, everything=True)
    assert live.folder.exists()


def leash_clean(root: Path, *words: str, stdin: int = subprocess.DEVNULL) -> list[str]:
    """What `leash gc --work` prints."""
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "flows.cli", "gc", "--work", *words]
    done = subprocess.run(command, cwd=root, env=environment, stdin=stdin, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_nothing_is_removed_without_a_yes(root: Path) -> None:
    assert leash_clean(root)[-1] == "nothing was removed; `leash gc --work --yes` removes what the table lists"
    assert (root / "work/one" / STALE).exists()
    assert leash_clean(root, "--yes")[-1] == "removed 1 things, 1.0 kB"
    assert leash_clean(root)[0] == "nothing is left behind"


@pytest.mark.parametrize("words", [["--all"], ["--work", "--studies", "betas"]])
def test_options_of_the_other_table_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(root)
    assert CliRunner().invoke(app, ["gc", *words, "--yes"]).exit_code == 2
    assert (root / "work/one" / STALE).exists()


@pytest.mark.parametrize(("answer", "stays"), [("n", True), ("", True), ("y", False)])
def test_a_person_confirms(root: Path, answer: str, stays: bool) -> None:
    terminal, person = os.openpty()
    os.write(terminal, f"{answer}\n".encode())
    printed = leash_clean(root, stdin=person)
    os.close(person)
    os.close(terminal)
    assert "Remove 1 things, 1.0 kB? [y/N]: " in "\n".join(printed)
    assert (root / "work/one" / STALE).exists() is stays
