"""The scripts of examples/: the check of results in CI, and the job for Slurm."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import flows
from tests.conftest import ROOT, call, commit, write_graph
from tests.faults.conftest import until

CHECK, JOB = ROOT / "examples/check-results.sh", ROOT / "examples/slurm.sh"
TWO: dict[str, tuple[str, list[str]]] = {"one": ("work", []), "two": ("work", ["one"])}


def check(root: Path) -> tuple[int, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [CHECK], cwd=root, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, empty_project: Path) -> Path:
    """A folder with a clone of a project, and the remote that has its results."""
    folder, dvc = tmp_path_factory.mktemp("examples"), (sys.executable, "-m", "dvc")
    root = Path(shutil.copytree(empty_project, folder / "toy"))
    write_graph(root, TWO)
    call(root, *dvc, "repro")
    call(root, *dvc, "remote", "add", "-d", "store", "../remote")
    commit(root)
    call(root, *dvc, "push")
    call(folder, "git", "clone", "--quiet", str(root), "clone")
    return folder


@pytest.fixture
def pushed(template: Path, tmp_path: Path) -> Path:
    """A copy of the clone, with a copy of the remote beside it."""
    for name in ("remote", "clone"):
        shutil.copytree(template / name, tmp_path / name, symlinks=True)
    return tmp_path / "clone"


def test_results_of_the_commit_pass(pushed: Path) -> None:
    assert check(pushed) == (0, "results belong to this commit, and the remote has them\n")
    assert not (pushed / "one.out").exists(), "the check has downloaded something"


def test_results_of_other_inputs_are_refused(pushed: Path) -> None:
    (pushed / "input.txt").write_text("2\n")
    code, printed = check(pushed)
    assert code == 1
    assert "dvc.lock does not belong to this commit" in printed


def test_a_remote_without_a_result_is_refused(pushed: Path, tmp_path: Path) -> None:
    stages = YAML(typ="safe", pure=True).load(pushed / "dvc.lock")["stages"]
    digest = stages["two"]["outs"][0]["md5"]
    (tmp_path / "remote/files/md5" / digest[:2] / digest[2:]).unlink()
    code, printed = check(pushed)
    assert code == 1
    assert "not in DVC's remote: two.out" in printed


def test_the_job_for_ci_runs_the_check() -> None:
    job = YAML(typ="safe", pure=True).load(ROOT / "examples/ci.yml")["jobs"]["results"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert "examples/check-results.sh" in commands
    assert set(job["env"]) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with `srun`, which starts its command, and `scontrol`, which notes its words."""
    folder = tmp_path / "bin"
    folder.mkdir()
    python = f"#!{sys.executable}\nimport os, sys, json, pathlib\n"
    (folder / "srun").write_text(f"{python}os.execvp(sys.argv[2], sys.argv[2:])\n")
    (folder / "leash").write_text(f'#!/bin/sh\nexec {sys.executable} -m flows.cli "$@"\n')
    note = f"pathlib.Path({str(tmp_path / 'requeued')!r}).write_text(json.dumps(sys.argv[1:]))"
    (folder / "scontrol").write_text(f"{python}{note}\n")
    for program in folder.iterdir():
        program.chmod(0o755)
    return folder


def submit(root: Path, cluster: Path, api: str) -> "subprocess.Popen[str]":
    path = os.pathsep.join([str(cluster), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(flows.__file__).parent.parent), "PREFECT_API_URL": api}
    env |= {"SLURM_SUBMIT_DIR": str(root), "SLURM_JOB_ID": "7"}
    return subprocess.Popen([JOB], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            start_new_session=True)  # fmt: skip


@pytest.mark.slow
def test_a_job_at_its_time_limit_is_queued_again(
    toy: Callable[..., Path], cluster: Path, prefect_api: str, tmp_path: Path
) -> None:
    root = toy({"one": ("wait", []), "two": ("work", ["one"])})
    job = submit(root, cluster, prefect_api)
    until(lambda: (root / "log.txt").exists())
    leader = next(int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and is_run(pid, job.pid))  # noqa: PTH208
    os.kill(leader, signal.SIGTERM)
    printed, _ = job.communicate(timeout=90)
    assert json.loads((tmp_path / "requeued").read_text()) == ["requeue", "7"], printed
    assert not (root / "two.out").exists()

    (tmp_path / "requeued").unlink()
    (root / "go").touch()
    job = submit(root, cluster, prefect_api)
    printed, _ = job.communicate(timeout=120)
    assert job.returncode == 0, printed
    assert (root / "two.out").exists()
    assert not (tmp_path / "requeued").exists()


def is_run(pid: str, job: int) -> bool:
    """Whether a process is the `leash run` that a job has started."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"flows.cli" in words and os.getsid(int(pid)) == job
    except OSError:
        return False


@pytest.mark.slow
def test_a_job_that_fails_is_not_queued_again(
    toy: Callable[..., Path], cluster: Path, prefect_api: str, tmp_path: Path
) -> None:
    job = submit(toy({"one": ("refuse no-data", [])}), cluster, prefect_api)
    printed, _ = job.communicate(timeout=120)
    assert job.returncode == 2, printed
    assert not (tmp_path / "requeued").exists()
