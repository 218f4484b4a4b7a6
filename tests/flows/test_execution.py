"""Stages side by side: one by default, and no stage twice. Untested on GPUs: their names are invented."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flows import driver, processes, workspace
from flows.graph import opened
from flows.pipeline import Run, pipeline, places, stage_task
from flows.workspace import Workspace
from tests.conftest import ROOT, commit
from tests.faults.conftest import until
from tests.flows.test_pipeline import moments

Toy = Callable[..., Path]
WIDE = {"first": ("work", []), **{name: ("sleep 1", ["first"]) for name in "abcd"}, "last": ("work", list("abcd"))}


@pytest.fixture
def busy() -> Iterator[None]:
    """A process that keeps a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


def most_at_once(root: Path) -> int:
    spans = [tuple(times[-2:]) for times in moments(root).values()]
    return max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans)


@pytest.mark.parametrize(
    ("jobs", "visible", "expected"), [(1, "", 1), (3, "", 3), (4, "0", 1), (2, "0,1,2,3", 2), (4, "5,GPU-ab", 2)]
)
def test_never_more_stages_than_gpus(monkeypatch: pytest.MonkeyPatch, jobs: int, visible: str, expected: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert places(jobs) == expected


def test_stages_run_one_at_a_time_by_default(toy: Toy, prefect_api: str) -> None:
    root = toy({name: stage for name, stage in WIDE.items() if name in ("first", "a", "b")})
    pipeline(root=str(root))
    assert most_at_once(root) == 1
    assert list(moments(root)) == ["first", "a", "b"], "not in the order of the graph"


@pytest.mark.slow
def test_only_after_a_kill_is_a_lock_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that lives is not waited for. One that was killed left the lock to a guardian, here `sleep`."""
    path = tmp_path / "a.lock"
    assert driver.patience(path, 60.0) == 0.0, "no lock"
    code = "import subprocess, sys, time; from pathlib import Path; from rlhf_core.locks import FileLock\n"
    code += f"lock = FileLock(Path({str(path)!r})); lock.acquire()\n"
    code += "subprocess.Popen(['sleep', '60'], pass_fds=[lock.descriptor]); print(1, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert driver.patience(path, 60.0) == 0.0
        assert capsys.readouterr().out == ""
        process.kill()
        process.wait()
        try:
            assert driver.patience(path, 60.0) == 60.0
            assert capsys.readouterr().out.startswith("the stages of a killed run are still stopping here; waiting")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    until(lambda: driver.patience(path, 60.0) == 0.0, seconds=10)


def test_two_workspaces_do_not_run_the_same_stage_twice(toy: Toy) -> None:
    """The second waits, says for whom, and gets the result from DVC's cache."""
    home = toy({"one": ("wait", [])})
    (home / "params.yaml").write_text("a: 1\n")
    commit(home)
    head = workspace.resolve(home, "HEAD")
    lines: dict[str, list[str]] = {"first": [], "second": []}
    states: dict[str, str] = {}

    def run(name: str) -> None:
        with workspace.opened(Workspace(home, name, head)) as made, opened(made.root) as project:
            shared = Run(project, False, None, 1, lambda stage, line: lines[name].append(line))
            states[name] = str(stage_task.fn(shared, "one").name)

    with processes.session(), ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, "first")
        until(lambda: "one begins" in lines["first"])
        second = pool.submit(run, "second")
        until(lambda: any("waits" in line for line in lines["second"]))
        for name in lines:
            (home / "work/runs" / name / "tree/go").touch()
        first.result(60)
        second.result(60)
    assert states == {"first": "Completed", "second": "Restored"}
    (waits,) = [line for line in lines["second"] if "waits" in line]
    assert waits.startswith(f"waits for its result from another workspace (process {os.getpid()}, user ")
    assert not list((home / "work/executions").iterdir())


@pytest.mark.slow
@pytest.mark.chosen("3")
@pytest.mark.parametrize("times", [3, 10])
def test_two_jobs_give_the_bytes_of_one_under_load(
    toy: Toy, busy: None, serial: Callable[[Path], None], prefect_api: str, times: int
) -> None:
    root = toy(WIDE)
    twin = Path(shutil.copytree(root, root.with_name("twin")))
    serial(twin)
    at_once = []
    for _ in range(times):
        for path in (*root.glob("*.out"), root / "dvc.lock", root / "log.txt"):
            path.unlink(missing_ok=True)
        shutil.rmtree(root / ".dvc" / "cache", ignore_errors=True)
        outcomes: dict[str, Any] = pipeline(root=str(root), jobs=2, retries=0)
        assert {one.state for one in outcomes.values()} == {"Completed"}
        assert (root / "dvc.lock").read_bytes() == (twin / "dvc.lock").read_bytes()
        at_once.append(most_at_once(root))
    assert max(at_once) == 2
    assert {path.name for path in (root / "work").iterdir()} <= {"driver.lock", "hashes.json"}
