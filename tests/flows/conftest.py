"""Toy DVC projects and the one Prefect server of the session. Nothing here knows the real stages."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flows

WORKER = """
import json, os, pathlib, sys, time

name, what, *rest = sys.argv[1:]
log = pathlib.Path("log.txt")
def note(event):
    with log.open("a") as file:
        file.write(f"{name} {event} {time.time()} {os.getpid()} {sys.executable}\\n")
def end(status, message=""):
    if path := os.environ.get("LEASH_OUTCOME"):
        outcome = {"stage": name, "exit": status, "message": message, "key": "k"}
        pathlib.Path(path).write_text(json.dumps(outcome) + "\\n")
    note("end")
    sys.exit(status)

note("begin")
print(name, "begins", flush=True)
if what == "refuse":
    end(2, rest[0])
if what == "crash" and len([l for l in log.read_text().splitlines() if l.startswith(name + " begin")]) <= int(rest[0]):
    raise RuntimeError("boom")
time.sleep(float(rest[0]) if what == "sleep" else 0)
pathlib.Path(name + ".out").write_text(name + pathlib.Path("input.txt").read_text())
end(0)
"""

Stages = dict[str, tuple[str, list[str]]]
"""Stage -> what it does (`work`, `sleep 1`, `refuse MESSAGE`, `crash TIMES`) and the stages that it needs."""


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., Path]:
    """Makes a DVC project of stages that note when they begin and end in log.txt."""

    def make(stages: Stages, name: str = "toy") -> Path:
        root = tmp_path / name
        root.mkdir()
        call(root, "git", "init", "--quiet")
        call(root, sys.executable, "-m", "dvc", "init", "--quiet")
        call(root, sys.executable, "-m", "dvc", "config", "core.analytics", "false")
        (root / "input.txt").write_text("1\n")
        (root / "worker.py").write_text(WORKER)
        write_graph(root, stages)
        return root

    return make


def write_graph(root: Path, stages: Stages) -> None:
    lines = ["stages:"]
    for stage, (what, needs) in stages.items():
        lines += [
            f"  {stage}:",
            f"    cmd: {json.dumps(f'python worker.py {stage} {what}')}",
            "    deps:",
            "    - input.txt",
        ]
        lines += [f"    - {need}.out" for need in needs]
        lines += ["    outs:", f"    - {stage}.out"]
    (root / "dvc.yaml").write_text("\n".join(lines) + "\n")


def call(root: Path, *command: str) -> str:
    """Runs a command to its good end; its output."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def serial() -> Callable[[Path], None]:
    """`dvc repro`, the other driver."""

    def repro(root: Path) -> None:
        call(root, sys.executable, "-m", "dvc", "repro")

    return repro


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[str]:
    """The URL of a Prefect server with a database of its own; flows of this process use it, too."""
    from prefect.settings import PREFECT_API_URL
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield str(PREFECT_API_URL.value())


@pytest.fixture
def leash(tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts `python -m flows.cli` in a session of its own, as a terminal does, with `api` as its Prefect server."""

    def start(folder: Path, *arguments: str, api: str | None = None) -> "subprocess.Popen[str]":
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_API", "MLFLOW"))}
        env["PYTHONPATH"] = str(Path(flows.__file__).parent.parent)
        env["PREFECT_HOME"] = str(tmp_path / "prefect")
        if api:
            env["PREFECT_API_URL"] = api
        command = [sys.executable, "-m", "flows.cli", *arguments]
        return subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    return start
