"""What tests of the whole share: a copy of the project in a folder of its own, one finished tiny run of it, toy DVC
projects whose stages take no time, and the one Prefect server of the session."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from ruamel.yaml import YAML

import flows
from flows import processes
from tasks.stage.run import main as run_stage
from tasks.tracking.settings import HOLD_VARIABLE
from tests import warm

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.yaml")) if not path.stem.endswith(".expected")]
"""The parameter files of examples/."""

RECORDER = f"""
import sys

if getattr(sys, "orig_argv", [])[-3:-1] == ["-m", "tasks"]:
    sys.path.append({str(Path(__file__).parent)!r})
    import warm

    sys.path.pop()
    warm.record()
"""
"""A sitecustomize.py that records what each stage's process loads and opens."""
LIGHT = ("check", "ingest", "report", "hybrid", "reinforce", "grpo")
"""Stages that only read files, or that the tiny run switches off: they must load no heavy library."""


RECORDED = {HOLD_VARIABLE: "1"}
"""For stages whose runs are only recorded: no process beside each stage imports mlflow to show them. With an empty text
they are sent."""
OPTIONAL = (
    ("quantize", "bitsandbytes", "test-quantize"),
    ("real_model", "gguf", "setup-dev"),
)
"""Markers, the package that their tests need, and the target of the Makefile that installs it."""


def pytest_configure() -> None:
    """Hypothesis sets no time limit: on a busy machine any example can be slow. A shell starts what it puts into the
    background deaf to Ctrl-C, and all that this starts; many tests send one."""
    settings.register_profile("leash", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow]))
    settings.load_profile("leash")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases that no `chosen` names are exhaustive. Tests of an optional package are skipped where it is not installed.
    Tests that use the tiny run come first: one worker makes it while the other runs what comes last. They and the slow
    ones may take 15 minutes: on a busy machine, each takes ten times as long."""
    mark_exhaustive(items, complete=not any("::" in argument for argument in config.args))
    for mark, package, target in OPTIONAL:
        for item in items if find_spec(package) is None else ():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(f"{package} is not installed; `make {target}` has it"))
    items.sort(key=uses_tiny_run, reverse=True)
    for item in items:
        if uses_tiny_run(item) or (item.get_closest_marker("slow") and not item.get_closest_marker("timeout")):
            item.add_marker(pytest.mark.timeout(900))


def mark_exhaustive(items: list[pytest.Item], complete: bool) -> None:
    """Mark the cases of a test that its `chosen` does not name `exhaustive` and `slow`. Fails where it names one that
    there is not, if the collection is `complete`."""
    unseen: dict[str, set[str]] = {}
    for item in items:
        if chosen := item.get_closest_marker("chosen"):
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            unseen.setdefault(test, set(chosen.args)).discard(case)
            if case not in chosen.args:
                item.add_marker("exhaustive")
                item.add_marker("slow")
    if complete and (wrong := [f"{test}[{case}]" for test, cases in unseen.items() for case in cases]):
        raise pytest.UsageError(f"the marker `chosen` names cases that do not exist: {', '.join(wrong)}")


def uses_tiny_run(item: pytest.Item) -> bool:
    """Whether the fixture `tiny_run` is among those of the test, or among those that these use."""
    return "tiny_run" in getattr(item, "fixturenames", ())


@pytest.fixture(autouse=True)
def _new_session() -> None:
    """Processes may start, although a test before has stopped all of them."""
    with processes._live.lock:
        processes._live.closing = False


@dataclass(frozen=True)
class Project:
    """A clone of Leash in a folder of its own."""

    root: Path

    def run(self, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a command at the root in a process group of its own, with this interpreter's programs first on PATH."""
        with self._start(command, environment, subprocess.PIPE, subprocess.PIPE) as process:
            printed = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, *printed)

    def run_into(self, log: Path, *command: str, **environment: str) -> int:
        """The same with what it prints in a file: nobody waits for processes that outlive it. Its exit status."""
        with log.open("w") as file, self._start(command, environment, file, file) as process:
            return process.wait()

    @contextmanager
    def _start(
        self, command: Sequence[str], environment: dict[str, str], stdout: Any, stderr: Any
    ) -> Iterator[warm.Popen]:
        """A process that is killed where the test fails meanwhile."""
        process = warm.Popen(
            command, cwd=self.root, env=clean_environment() | environment, stdout=stdout, stderr=stderr, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()

    def stage(self, name: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """`python -m tasks <name>`, as dvc.yaml has it; `RECORDED` unless the environment says otherwise."""
        return self.run(sys.executable, "-m", "tasks", name, **RECORDED | environment)

    def dvc(self, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """A dvc command that must end well."""
        done = self.run(sys.executable, "-m", "dvc", *words, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def repro(self, **environment: str) -> list[str]:
        """`dvc repro`; the stages that it ran, in order. `RECORDED` unless the environment says otherwise."""
        said = self.dvc("repro", **RECORDED | environment).stdout.splitlines()
        return [line.split("'")[1] for line in said if line.startswith("Running stage '")]

    def stale(self) -> set[str]:
        """The stages that `dvc repro` would run, by `dvc status`, without those whose inputs they make again."""
        from dvc.repo import Repo

        with Repo(str(self.root)) as repo:
            return {address.rpartition(":")[2] for address in repo.status()}

    def params(self) -> dict[str, Any]:
        """params.yaml as it is."""
        content: dict[str, Any] = YAML(typ="safe", pure=True).load(self.root / "params.yaml")
        return content

    def set(self, name: str, value: Any) -> None:
        """Write one parameter: `ppo.kl.coef`, 0.1."""
        content = self.params()
        *above, last = name.split(".")
        block = content
        for part in above:
            block = block.setdefault(part, {})
        block[last] = value
        YAML().dump(content, self.root / "params.yaml")

    def evaluate_little(self) -> None:
        """One answer to each of eight held-out prompts, of the models alone: for tests of something else."""
        little = {"max_prompts": 8, "seeds": [1], "snapshots": 0, "interpolation": [], "optimum_samples": 0}
        for name, value in little.items():
            self.set(f"evaluate.{name}", value)

    def use_files(self) -> None:
        """Read data/raw/set instead of the demo's data; no judge, no tracking, and both checks have run."""
        for name in ("check", "check_data"):
            (self.root / f"data/{name}.ok").touch()
        self.set("ingest.source", "files")
        self.set("ingest.files", {"path": "set"})
        self.set("preferences.source", "dataset")
        self.set("runtime.tracking", False)

    def json(self, path: str) -> Any:
        """A JSON file of the project."""
        return json.loads((self.root / path).read_text(encoding="utf-8"))

    def rows(self, path: str) -> list[dict[str, Any]]:
        """A JSONL file of the project."""
        text = (self.root / path).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.split("\n") if line]  # `splitlines` splits inside texts, at U+0085

    def write_rows(self, path: str, rows: list[dict[str, Any]]) -> None:
        """Replace a JSONL file of the project."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (self.root / path).write_text(text, encoding="utf-8")

    def outputs(self) -> dict[str, bytes]:
        """Every file below the outs of dvc.yaml, with its bytes; dvc.lock, too."""
        graph = YAML(typ="safe", pure=True).load(self.root / "dvc.yaml")["stages"]
        listed = [
            out for stage in graph.values() for kind in ("outs", "metrics", "plots") for out in stage.get(kind, [])
        ]
        places = [self.root / (out if isinstance(out, str) else next(iter(out))) for out in listed]
        files = [file for place in places for file in (place, *place.rglob("*")) if file.is_file()]
        files.append(self.root / "dvc.lock")
        return {file.relative_to(self.root).as_posix(): file.read_bytes() for file in files if file.exists()}


@dataclass(frozen=True)
class TinyRun:
    """A project after one whole `dvc repro` with examples/tiny.yaml."""

    project: Project
    ran: list[str]
    """The stages that the first `dvc repro` executed."""
    record: Path
    """A folder with `<stage>.json`: {"modules": […], "opened": […]} of each stage's process."""


def clean_environment() -> dict[str, str]:
    """The environment without what would send a test's run somewhere else."""
    leave = ("MLFLOW_", "LEASH_", "PREFECT_API", "PREFECT_HOME", "PREFECT_PROFILES", "DVC_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(leave)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return kept | {"PATH": path, "HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONUNBUFFERED": "1"}


def clone(target: Path, database: Path) -> Project:
    """What git tracks and would track, committed in a repository of its own, with the tiny parameters."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, done.stdout.split("\0")):
        if (source := ROOT / name).is_file() and not name.endswith("dvc.lock"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    tiny = (target / "examples" / "tiny.yaml").read_text(encoding="utf-8")
    (target / "params.yaml").write_text(f"{tiny}\nruntime:\n  project: leash\n", encoding="utf-8")
    shutil.copy2(database, target / "mlflow.db")
    project = Project(target)
    somebody = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    for words in (("init", "--quiet"), ("add", "--all"), (*somebody, "commit", "--quiet", "--message", "a clone")):
        done = project.run("git", *words)
        assert done.returncode == 0, done.stderr
    return project


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty data base of MLflow: making its tables takes seconds, and each clone needs one."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def project(tmp_path: Path, database: Path) -> Project:
    """A fresh clone with the tiny parameters; nothing has run."""
    return clone(tmp_path / "clone", database)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, database: Path) -> TinyRun:
    """The one whole tiny run of the session, whichever worker makes it. Look at it, do not change it; `finished` is a
    copy to work on."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny"
    with FileLock(f"{folder}.lock"):
        if not (folder / "ran.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            ran = make_tiny_run(folder, database)
            (folder / "ran.json").write_text(json.dumps(ran), encoding="utf-8")
    ran = json.loads((folder / "ran.json").read_text(encoding="utf-8"))
    return TinyRun(Project(folder / "first-place"), ran, folder / "record")


def make_tiny_run(folder: Path, database: Path) -> list[str]:
    """The stages that ran."""
    record, hooks = folder / "record", folder / "hooks"
    record.mkdir(parents=True)
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(RECORDER, encoding="utf-8")
    project = clone(folder / "first-place", database)
    hooked = {"PYTHONPATH": str(hooks), warm.RECORD: str(record), warm.NEW_INTERPRETERS: " ".join(LIGHT)}
    ran = project.repro(**hooked, TZ="Asia/Kathmandu")
    from tasks.tracking.exporter import export  # imports mlflow

    export(project.root, f"sqlite:///{project.root / 'mlflow.db'}")  # a copy would send what waits as its own
    return ran


@pytest.fixture
def finished(tiny_run: TinyRun, tmp_path: Path) -> Project:
    """A copy of the finished tiny run."""
    return Project(Path(shutil.copytree(tiny_run.project.root, tmp_path / "finished", symlinks=True)))


@dataclass(frozen=True)
class Ended:
    """How a stage's main function left."""

    code: int
    stderr: str
    stdout: str = ""


@pytest.fixture
def in_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[[Path, Callable[[], object]], Ended]]:
    """Calls a main function at a root, within this process, and says with which code and words it left.

    What takes seconds to import (torch) is imported once for all tests that use this.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def call(root: Path, main: Callable[[], object]) -> Ended:
        monkeypatch.chdir(root)
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        printed = capfd.readouterr()
        return Ended(int(left.value.code or 0), printed.err, printed.out)

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def stage_main(
    in_process: Callable[[Path, Callable[[], object]], Ended], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Project, str], Ended]:
    """`python -m tasks <stage>` within this process, with the code of the checkout under test; `RECORDED`."""
    monkeypatch.setenv(HOLD_VARIABLE, "1")
    return lambda project, stage: in_process(project.root, lambda: run_stage([stage]))


Reproduce = Callable[..., list[str]]


@pytest.fixture
def reproduce(stage_main: Callable[[Project, str], Ended], monkeypatch: pytest.MonkeyPatch) -> Reproduce:
    """`dvc repro`, of all stages or those named and before, by DVC itself; the stages run within this process, in a
    fraction of the time. Returns those that ran, in order."""
    from dvc.repo import Repo
    from dvc.stage import run

    def reproduce(project: Project, *stages: str) -> list[str]:
        ran = []

        def run_here(stage: Any, **_: object) -> None:
            ran.append(stage.name)
            ended = stage_main(project, stage.name)
            assert ended.code == 0, f"{stage.name}: {ended.stderr}"

        monkeypatch.chdir(project.root)
        with monkeypatch.context() as patched, Repo(str(project.root)) as repo:
            patched.setattr(run, "cmd_run", run_here)
            patched.setattr(logging.getLogger("dvc"), "handlers", [])  # they hold streams of another test
            repo.reproduce(list(stages) or None)
        return ran

    return reproduce


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
while what == "wait" and not pathlib.Path("go").exists():
    time.sleep(0.05)
pathlib.Path(name + ".out").write_text(name + pathlib.Path("input.txt").read_text())
end(0)
"""

Stages = dict[str, tuple[str, list[str]]]
"""Stage -> what it does (`work`, `sleep 1`, `wait` for the file `go`, `refuse MESSAGE`, `crash TIMES`) and the stages
that it needs."""


@pytest.fixture(scope="session")
def empty_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of git and DVC with the files of the toy stages: making one takes a second."""
    root = tmp_path_factory.mktemp("toy") / "empty"
    root.mkdir()
    call(root, "git", "init", "--quiet")
    call(root, sys.executable, "-m", "dvc", "init", "--quiet")
    call(root, sys.executable, "-m", "dvc", "config", "core.analytics", "false")
    (root / "input.txt").write_text("1\n")
    (root / "worker.py").write_text(WORKER)
    return root


@pytest.fixture
def toy(tmp_path: Path, empty_project: Path) -> Callable[..., Path]:
    """Makes a DVC project of stages that note when they begin and end in log.txt."""

    def make(stages: Stages, name: str = "toy") -> Path:
        root = Path(shutil.copytree(empty_project, tmp_path / name))
        write_graph(root, stages)
        return root

    return make


def table_rows(text: str) -> list[list[str]]:
    """The cells of the Markdown table in the text, with its heading and the line below it."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def benchmark(name: str) -> ModuleType:
    """A script of benchmarks/, as Python finds it and its siblings when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return import_module(name)


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


def commit(root: Path) -> None:
    """Commit everything that git does not ignore, without the folder work/ and the log of the stages."""
    with (root / ".git/info/exclude").open("a") as file:
        file.write("work\nlog.txt\nmlflow.db\n")
    with (root / ".dvcignore").open("a") as file:
        file.write("work\n")
    call(root, "git", "add", "--all")
    call(root, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "a commit")


def call(root: Path, *command: str) -> str:
    """Runs a command to its good end; its output."""
    own = {name: clean_environment()[name] for name in ("PATH", "HF_HUB_OFFLINE", "PYTHONUNBUFFERED")}
    with warm.Popen(
        command, cwd=root, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        printed, errors = process.communicate()
    assert process.returncode == 0, printed + errors
    return printed


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
        env |= RECORDED
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
