"""SIGKILL at moments chosen by seed, of the stage, of dvc, or of both: the same command continues to the same bytes, in
the same MLflow run. The killer is a `sitecustomize.py` in the stage's process; the product does not contain it."""

import json
import random
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mlflow.tracking import MlflowClient
from ruamel.yaml import YAML

from rlhf_core import files
from tasks.stage.state import FINISHED
from tasks.tracking.exporter import export
from tests.conftest import RECORDED

if TYPE_CHECKING:
    from tests.conftest import Project, TinyRun

KILLS = 20
PATIENCE = 120.0
VICTIMS = ("stage", "dvc", "group")
EVENTS = ("rename", "write", "line")
VARIABLE = "LEASH_TEST_KILL"

KILLER = """
import atexit, json, os, re, signal, sys

words = getattr(sys, "orig_argv", [])
plan = json.loads(os.environ.get("LEASH_TEST_KILL", "{}"))


def stat(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def is_dvc(pid):
    with open(f"/proc/{pid}/comm") as name, open(f"/proc/{pid}/cmdline") as command:
        return name.read() == "dvc\\n" or "dvc" in command.read().split("\\0")  # a warm one has only the name


def strike():
    plan["count"] = -1
    if plan["victim"] == "stage":
        os.kill(os.getpid(), signal.SIGKILL)
    if plan["victim"] == "group":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    pid = os.getpid()
    while not is_dvc(pid):
        pid = int(stat(pid)[1])
    os.kill(pid, signal.SIGKILL)


def count(event):
    if event == plan["event"]:
        plan["count"] -= 1
        if plan["count"] == 0:
            strike()


def on_event(event, details):
    if event == "open" and isinstance(details[0], str) and details[2] & (os.O_WRONLY | os.O_RDWR):
        if os.path.abspath(details[0]).startswith(os.getcwd() + os.sep):
            count("write")
        if os.path.basename(details[0]) == "dvc.lock":
            count("lock")
    if event == "os.rename" and str(details[0]).endswith(".partial"):
        if os.path.relpath(details[0]).split(os.sep)[0] in ("data", "metrics", "models", "plots"):
            count("rename")


class Lines:
    def __init__(self, real):
        self.real = real

    def write(self, text):
        self.real.write(text)
        self.real.flush()
        of_loop = re.match(r"\\[[^\\]]+\\] \\S+ [0-9]+/[0-9]+  ", text)  # not what is done before it, or inside a round
        inside = ("encoding ", "reading ", "scoring ", "updating ", "sampling ")
        if of_loop and not any(work in text for work in inside):
            count("line")

    def __getattr__(self, name):
        return getattr(self.real, name)


place = ["dvc", "repro"] if plan.get("event") in ("lock", "recorded") else ["tasks", plan.get("stage")]
if words[1:2] == ["-m"] and words[2:4] == place:
    sys.addaudithook(on_event)
    atexit.register(count, "recorded")
    sys.stdout = Lines(sys.stdout)
"""


@dataclass(frozen=True)
class Moment:
    """Who is killed, and before which event (the count-th of its kind) of the stage's process; `lock` is before DVC
    writes dvc.lock, `recorded` when all is done."""

    stage: str
    event: str
    count: int
    victim: str

    def __str__(self) -> str:
        return f"{self.stage}-{self.event}-{self.count}-{self.victim}"

    def environment(self, folder: Path) -> dict[str, str]:
        """What a process needs to meet it; `folder` keeps the hook."""
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(KILLER, encoding="utf-8")
        return {"PYTHONPATH": str(folder), VARIABLE: json.dumps(asdict(self))}


LEAST = {
    "base": {"rename": 2, "write": 30, "line": 6},
    "sft": {"rename": 3, "write": 120, "line": 20},
    "preferences": {"rename": 3, "write": 8, "line": 4},
    "reward": {"rename": 4, "write": 20, "line": 4},
    "ppo": {"rename": 5, "write": 20, "line": 4},
    "evaluate": {"rename": 4, "write": 20, "line": 8},
    "select": {"rename": 3, "write": 8, "line": 3},
    "best_of_n": {"rename": 2, "write": 4, "line": 1},
    "rejection_sft": {"rename": 4, "write": 20, "line": 4},
    "dpo": {"rename": 3, "write": 15, "line": 3},
    "rloo": {"rename": 3, "write": 15, "line": 4},
}
"""How often each event happens in the tiny run of each stage with a checkpoint a step, or less."""


def moments(number: int, seed: int = 4) -> list[Moment]:
    """`number` moments: every stage in turn, all events and victims, the count drawn by seed."""
    draw, stages = random.Random(seed), list(LEAST)
    chosen = []
    for i in range(number):
        stage = stages[i % len(stages)]
        event = EVENTS[(i // 2 + i // len(stages)) % len(EVENTS)]
        victim = VICTIMS[(i + i // len(stages)) % len(VICTIMS)]
        chosen.append(Moment(stage, event, draw.randint(1, LEAST[stage][event]), victim))
    return chosen


def repro(project: "Project", stage: str, log: Path, **environment: str) -> int:
    """`dvc repro` of one stage, which finds its results in no cache. Its exit status."""
    words = ["-m", "dvc", "repro", "--single-item", "--no-run-cache", stage]
    return project.run_into(log, sys.executable, *words, **RECORDED | environment)


def lock(content: bytes) -> dict[str, Any]:
    """dvc.lock whatever the order of its stages: a new one is appended."""
    entries: dict[str, Any] = YAML(typ="safe", pure=True).load(content)["stages"]
    return entries


def outputs(project: "Project") -> tuple[dict[str, bytes], dict[str, Any]]:
    """Every output, and what dvc.lock records."""
    found = project.outputs()
    return found, lock(found.pop("dvc.lock"))


def repro_until_done(project: "Project", stage: str, log: Path) -> None:
    """Again and again while an orphan is still at it."""
    deadline = time.monotonic() + PATIENCE
    while repro(project, stage, log) != 0:
        printed = log.read_text(encoding="utf-8")
        assert "another process" in printed, printed
        assert time.monotonic() < deadline, "an orphan that never ends"
        time.sleep(0.2)


def prepare(project: "Project", stage: str, fresh: bool) -> None:
    """As if the stage had never run, or (`fresh`) as in a fresh clone, where it is recorded and no cache has it; a
    checkpoint and a progress line a step."""
    path = project.root / "dvc.lock"
    content = YAML().load(path)
    if fresh:
        for out in content["stages"][stage]["outs"]:
            files.remove(project.root / out["path"])
        shutil.rmtree(project.root / ".dvc" / "cache")
    else:
        del content["stages"][stage]
        YAML().dump(content, path)
    project.set("runtime.checkpoint_every", 1)
    project.set("runtime.progress_seconds", 0.0001)


def stage_runs(project: "Project", stage: str) -> list[str]:
    """The status of each MLflow run of the stage; no metric has a step twice."""
    address = f"sqlite:///{project.root / 'mlflow.db'}"
    export(project.root, address)
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("leash")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], f"tags.`leash.stage` = '{stage}'")
    for run in runs:
        for name in run.data.metrics:
            steps = [point.step for point in client.get_metric_history(run.info.run_id, name)]
            assert len(steps) == len(set(steps)), name
    return [run.info.status for run in runs]


CHOSEN = [
    Moment("base", "rename", 1, "stage"),  # before the first output is in place
    Moment("preferences", "write", 2, "group"),  # before the state is written
    Moment("reward", "write", 13, "stage"),  # while it is written
    Moment("ppo", "line", 4, "dvc"),  # after it was written
    Moment("select", "rename", 2, "stage"),  # between two outputs
    Moment("sft", "lock", 1, "dvc"),
    Moment("dpo", "recorded", 1, "dvc"),
]
"""Before, in and after each kind of write. The first is a fast test; CI runs these, `make test-all` the others."""
OTHERS = [moment for moment in moments(KILLS) if moment not in CHOSEN]


@pytest.mark.parametrize(
    "moment",
    [
        *(pytest.param(moment, marks=[pytest.mark.slow] * (moment != CHOSEN[0])) for moment in CHOSEN),
        *(pytest.param(moment, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for moment in OTHERS),
    ],
    ids=str,
)
def test_failure_01_killed_and_continued_is_the_same_bytes(
    tiny_run: "TinyRun", finished: "Project", tmp_path: Path, moment: Moment
) -> None:
    prepare(finished, moment.stage, fresh=moment.count % 2 == 0)
    killed = repro(finished, moment.stage, tmp_path / "killed", **moment.environment(tmp_path / "hook"))
    assert killed != 0, "the moment never came"
    assert (killed == -signal.SIGKILL) == (moment.victim != "stage"), "dvc ends with an error where its stage is killed"
    export(finished.root, f"sqlite:///{finished.root / 'mlflow.db'}")  # half a run
    repro_until_done(finished, moment.stage, tmp_path / "log")
    assert outputs(finished) == outputs(tiny_run.project)
    done = list((finished.root / "work" / moment.stage).glob("*"))
    assert [path for path in done if not (path / FINISHED).exists()] == [], "half-done state of a finished stage"
    assert stage_runs(finished, moment.stage) == ["FINISHED", "FINISHED"], "the first run, and this one continued"


@pytest.mark.slow
def test_a_prefect_retry_continues_to_the_same_bytes(
    tiny_run: "TinyRun", finished: "Project", tmp_path: Path, prefect_api: str
) -> None:
    """Killed at its last step and tried again by the flow: two lines are left, so the killer strikes once."""
    prepare(finished, "ppo", fresh=False)
    shutil.rmtree(finished.root / ".dvc" / "cache" / "runs")
    hook = Moment("ppo", "line", 4, "stage").environment(tmp_path / "hook")
    words = ["-m", "flows.cli", "run", "ppo", "--retries", "1", "--retry-delay", "0"]
    done = finished.run(
        sys.executable, *words, PREFECT_API_URL=prefect_api, PREFECT_HOME=str(tmp_path / "prefect"), **hook
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continues after step" in done.stdout
    (made, record), (right, recorded) = outputs(finished), outputs(tiny_run.project)
    assert (made, record["ppo"]) == (right, recorded["ppo"]), "the edit of `runtime` is `check`'s alone"
    assert stage_runs(finished, "ppo") == ["FINISHED", "FINISHED"]
