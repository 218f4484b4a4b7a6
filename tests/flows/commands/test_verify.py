"""`leash verify`: the recorded hashes against those of a rebuild from nothing, and a workspace that stays as it is."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from flows import workspace
from flows.commands.verify import Finding, Report, compare_outs, environment, render, verify
from rlhf_core.errors import UserError
from tasks.stage.dvc_files import open_project
from tasks.stage.provenance import KEYS, SUFFIX
from tests.conftest import call
from tests.faults.conftest import until

if TYPE_CHECKING:
    from tests.conftest import Project

GRAPH = """
stages:
  one:
    cmd: python worker.py one.out input.txt
    deps: [input.txt]
    outs: [one.out]
  two:
    cmd: python worker.py two.out input.txt one.out
    deps: [input.txt, one.out]
    params: [a]
    outs: [two.out]
  three:
    cmd: python worker.py three.out data/raw/set.txt
    deps: [data/raw]
    outs: [three.out]
"""
WORKER = """
import pathlib, sys, time

out, *deps = sys.argv[1:]
text = out + "".join(pathlib.Path(dep).read_text() for dep in deps)
with pathlib.Path("log.txt").open("a") as log:
    log.write(out + "\\n")
pathlib.Path(out).write_text(text)
"""


@pytest.fixture(scope="module")
def finished_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that has run and is committed: `two` reads what `one` makes; `three` reads raw data only."""
    root = tmp_path_factory.mktemp("toy")
    files = {"dvc.yaml": GRAPH, "worker.py": WORKER, "input.txt": "1\n", "params.yaml": "a: {b: 1}\nc: 1\n"}
    for name, text in (files | {"data/raw/set.txt": "raw\n", ".gitignore": "/work\n/log.txt\n"}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    call(root, "git", "init", "--quiet")
    for words in (("init", "--quiet"), ("add", "--quiet", "data/raw/set.txt"), ("repro",)):
        call(root, sys.executable, "-m", "dvc", *words)
    call(root, "git", "add", "--all")
    call(root, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "a run")
    return root


@pytest.fixture
def recorded(finished_toy: Path, tmp_path: Path) -> Path:
    """A copy of it to work on."""
    root = Path(shutil.copytree(finished_toy, tmp_path / "toy", symlinks=True))
    (root / "log.txt").unlink()
    return root


def edit(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text(encoding="utf-8")
    assert old in text
    (root / file).write_text(text.replace(old, new), encoding="utf-8")


def snapshot(root: Path) -> dict[str, str]:
    """Every file of the workspace with the hash of its bytes, without git's, notes of hashes, locks, compiled code."""
    leave = {".git", "tmp", "__pycache__", "hashes.json", "gc.lock", "worktrees.lock"}
    files = [path for path in root.rglob("*") if path.is_file() and not leave & set(path.parts[len(root.parts) :])]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rebuild(root: Path, *stages: str, keep: bool = False) -> Report:
    return verify(root, stages, keep, lambda stage, line: None)


def verdicts(report: Report) -> dict[str, str]:
    return {finding.out: finding.words for finding in report.findings}


def leftovers(root: Path) -> list[str]:
    """What is in work/runs/, and worktrees that git still lists."""
    listed = call(root, "git", "worktree", "list", "--porcelain").count("worktree ") - 1
    return [path.name for path in (root / "work/runs").glob("*")] + ["a worktree"] * listed


NOISE = "text += str(time.time_ns()) if out == 'one.out' else ''\nwith pathlib"


def test_the_same(recorded: Path) -> None:
    before = snapshot(recorded)
    report = rebuild(recorded)
    assert report.exit_code == 0
    assert verdicts(report) == {"one.out": "same", "two.out": "same", "three.out": "same"}
    assert all(finding.rebuilt == finding.recorded and len(finding.recorded) == 32 for finding in report.findings)
    assert report.dirty is False
    assert report.cpu in render(report).splitlines()[-1]
    assert leftovers(recorded) == []
    assert snapshot(recorded) == before


def test_the_first_stage_that_differs_is_named_and_what_follows_from_it(recorded: Path) -> None:
    edit(recorded, "worker.py", "with pathlib", NOISE)
    report = rebuild(recorded)
    assert report.exit_code == 1
    assert verdicts(report) == {
        "one.out": "DIFFERS",
        "two.out": "differs because its input one.out differs",
        "three.out": "same",
    }
    assert report.origins == ["one"]
    assert report.dirty is True
    assert "2 of 3 outs; first in one (" in render(report).splitlines()[-1]


def test_a_named_stage_reads_recorded_inputs_and_runs_alone(recorded: Path) -> None:
    edit(recorded, "worker.py", "with pathlib", NOISE)
    (recorded / "one.out").write_text("edited by hand", encoding="utf-8")  # the cache has what dvc.lock records
    report = rebuild(recorded, "two", keep=True)
    assert verdicts(report) == {"two.out": "same"}
    kept = Path(report.kept)
    assert (kept / "log.txt").read_text(encoding="utf-8") == "two.out\n"
    assert (kept / "one.out").read_text(encoding="utf-8") == "one.out1\n"
    assert f"the clone is kept: {kept}" in render(report)
    assert list(workspace.found(recorded)) == [(kept.parent, None)], "its maker does not hold it any longer"


def test_a_file_of_parameters_that_another_stage_makes_is_copied(recorded: Path) -> None:
    """`cache: false`, as data/methods.json; its maker does not run again."""
    (recorded / "source.json").write_text('{"x": 1}', encoding="utf-8")
    added = """
  made:
    cmd: cp source.json made.json
    deps: [source.json]
    outs: [made.json: {cache: false, persist: true}]
  reader:
    cmd: python worker.py reader.out input.txt
    deps: [input.txt]
    params: [made.json: [x]]
    outs: [reader.out]
"""
    (recorded / "dvc.yaml").write_text(GRAPH + added, encoding="utf-8")
    call(recorded, sys.executable, "-m", "dvc", "repro", "--quiet")
    assert verdicts(rebuild(recorded, "reader")) == {"reader.out": "same"}


def test_raw_data_come_from_the_cache_where_the_workspace_has_lost_them(recorded: Path) -> None:
    (recorded / "data/raw/set.txt").unlink()
    assert rebuild(recorded, "three").exit_code == 0
    assert not (recorded / "data/raw/set.txt").exists()


def cached(root: Path, file: str) -> Path:
    """The object of DVC's cache with the bytes of this file."""
    digest = hashlib.md5((root / file).read_bytes(), usedforsecurity=False).hexdigest()
    return root / ".dvc/cache/files/md5" / digest[:2] / digest[2:]


def test_raw_data_that_were_never_pulled(recorded: Path, tmp_path: Path) -> None:
    """A stage that does not read them needs none; one that does takes them from the remote."""
    call(
        recorded, sys.executable, "-m", "dvc", "remote", "add", "--quiet", "--default", "store", str(tmp_path / "store")
    )
    call(recorded, sys.executable, "-m", "dvc", "push", "--quiet")
    blob = cached(recorded, "data/raw/set.txt")
    blob.unlink()
    (recorded / "data/raw/set.txt").unlink()
    assert verdicts(rebuild(recorded, "one")) == {"one.out": "same"}
    assert not blob.exists()
    assert verdicts(rebuild(recorded, "three")) == {"three.out": "same"}


@pytest.mark.parametrize("error", [UserError("no worktree"), KeyboardInterrupt()])
def test_a_clone_that_cannot_be_made_is_removed(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(*words: object) -> None:
        raise error

    monkeypatch.setattr("tasks.stage.dvc_adapter.apply_overrides", broken)
    with pytest.raises(type(error)):
        rebuild(recorded, keep=True)
    assert leftovers(recorded) == []


def test_a_disk_without_room_for_a_clone(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the clone is made; 2.5 GiB would do for one copy of the output."""
    lock = recorded / "dvc.lock"
    lock.write_text(re.sub(r"(path: one.out\n(?: .*\n)+?      size:) \d+", rf"\1 {2**30}", lock.read_text()))
    usage = shutil.disk_usage(recorded)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5 * 2**29))
    monkeypatch.setattr(workspace, "opened", None)
    with pytest.raises(UserError, match=r"3\.2 GiB are needed for a clone and 2\.5 GiB are free; `leash gc --work`"):
        rebuild(recorded, "one")


def test_an_input_that_is_nowhere(recorded: Path) -> None:
    cached(recorded, "one.out").unlink()
    with pytest.raises(UserError, match=r"one\.out: \w{32}: neither the DVC cache"):
        rebuild(recorded, "two")
    assert leftovers(recorded) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("input.txt", "1", "2", "not that of one as it is now (input.txt changed)"),
        ("data/raw/set.txt", "raw", "row", "not that of three as it is now (data/raw/set.txt edited)"),
        ("params.yaml", "b: 1", "b: 2", "not that of two as it is now (a.b 1 → 2"),
        ("dvc.yaml", "worker.py three", "-O worker.py three", "not that of three as it is now (the command changed)"),
        ("dvc.yaml", "[input.txt, one.out]", "[input.txt, one.out, worker.py]", "two as it is now (worker.py changed)"),
        ("dvc.lock", "  three:", "  four:", "three as it is now (not run here yet)"),
        ("dvc.lock", "stages:", "stages: [", "dvc.lock"),
    ],
)
def test_a_stale_record_is_refused(recorded: Path, file: str, old: str, new: str, says: str) -> None:
    edit(recorded, file, old, new)
    with pytest.raises(UserError) as refusal:
        rebuild(recorded)
    assert says in str(refusal.value)
    assert leftovers(recorded) == []


def test_what_no_stage_reads_may_change(recorded: Path) -> None:
    edit(recorded, "params.yaml", "c: 1", "c: 2")
    report = rebuild(recorded, "two")
    assert report.exit_code == 0, report.failure


def compared(tmp_path: Path, out: str, contents: tuple[str, str], params: str = "{}", exempt: str = "") -> Finding:
    """The finding about a file with these contents, or a model folder, in the project and in its clone."""
    roots = (tmp_path / "project", tmp_path / "clone")
    for root, text in zip(roots, contents, strict=True):
        digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
        entry = f"one: {{cmd: c, params: {{params.yaml: {params}}}, outs: [{{path: {out}, md5: {digest}}}]}}"
        names = list(json.loads(params))
        for name, content in {
            "dvc.yaml": f"stages: {{one: {{cmd: c, params: {names}, outs: [{out}]}}}}",
            "dvc.lock": f"stages: {{{entry}}}",
            out: text,
            f"{out}{SUFFIX}": json.dumps(dict.fromkeys(KEYS, "") | {"exemptions": [exempt] if exempt else []}),
        }.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content, encoding="utf-8")
    with open_project(roots[0]) as project:
        [finding] = compare_outs(project, roots[1], "one")
    return finding


def test_an_exempt_run_is_reported(tmp_path: Path) -> None:
    """It may differ; the provenance of its model has the reason."""
    finding = compared(tmp_path, "models/m", ("old", "new"), exempt="the micro-batch was halved")
    assert finding.words == "DIFFERS (the recorded run was exempt: the micro-batch was halved)"


def test_how_large_a_difference_is(tmp_path: Path) -> None:
    """Another type of CPU gives other last digits."""
    finding = compared(tmp_path, "m.json", ('{"gold": 3.1, "n": 400}', '{"gold": 3.1000000000000005, "n": 400}'))
    assert finding.words == "DIFFERS: largest relative difference 1e-16 at gold"


def test_a_run_without_deterministic_kernels_is_exempt(tmp_path: Path) -> None:
    """Its parameters say so, for outputs that are no models, too."""
    for params, exempt in (('{"deterministic": false}', 1), ('{"deterministic": true}', 0), ("{}", 0)):
        finding = compared(tmp_path, "metrics/m.json", ("{}", "[]"), params)
        assert finding.words.count("deterministic: false selects the fastest kernels") == exempt


def test_a_rebuild_that_fails_is_reported(recorded: Path) -> None:
    edit(recorded, "worker.py", "with pathlib", "1 / (out != 'one.out')\nwith pathlib")
    report = rebuild(recorded, "one", "two")
    assert report.exit_code == 1
    assert set(verdicts(report).values()) == {"not rebuilt"}
    assert "ZeroDivisionError" in render(report).splitlines()[-1]


def test_no_record(recorded: Path) -> None:
    (recorded / "dvc.lock").unlink()
    with pytest.raises(
        UserError, match=r"dvc\.lock is not that of one as it is now \(not run here yet\); run `dvc repro`"
    ):
        rebuild(recorded)


def test_the_clones_own_code_runs_and_sends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/another/checkout")
    monkeypatch.setenv("GIT_DIR", "/another/.git")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    changed = environment(tmp_path)
    assert changed["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/another/checkout"
    assert changed["GIT_DIR"] is None
    assert changed["PYTHONSAFEPATH"] is None
    assert changed["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/mlflow.db"


def interrupt(process: "subprocess.Popen[str]") -> None:
    os.killpg(process.pid, signal.SIGINT)


def terminate(process: "subprocess.Popen[str]") -> None:
    process.terminate()


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()


@pytest.mark.slow
@pytest.mark.chosen("interrupt-130", "kill--9")
@pytest.mark.parametrize(("end", "code"), [(interrupt, 130), (terminate, 143), (kill, -9)])
def test_a_stopped_verification_leaves_nothing(
    recorded: Path,
    leash: Callable[..., "subprocess.Popen[str]"],
    end: Callable[["subprocess.Popen[str]"], None],
    code: int,
) -> None:
    """No process and no clone is left; after SIGKILL, which cannot be handled, `leash gc --work` finds the clone."""
    root = recorded
    edit(root, "worker.py", "with pathlib", "time.sleep(100 if pathlib.Path('log.txt').exists() else 0)\nwith pathlib")
    process = leash(root, "verify")
    until(lambda: any((root / "work").glob("runs/verify-*/tree/one.out")))
    family = psutil.Process(process.pid).children(recursive=True)
    end(process)
    process.communicate(timeout=60) if end is not kill else process.wait(60)
    assert process.returncode == code
    if end is kill:
        for child in family:
            with suppress(psutil.NoSuchProcess):  # the driver's guardian may have been faster
                child.kill()
        [name, _] = leftovers(root)
        assert call(root, *cli(), "gc", "--work").splitlines()[1].startswith(f"work/runs/{name} ")
        assert "removed 1 things" in call(root, *cli(), "gc", "--work", "--yes")
    assert [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    assert leftovers(root) == []


def cli() -> list[str]:
    """`leash` with the code under test, wherever it is started."""
    project = str(Path(workspace.__file__).parents[1])
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {project!r}); from flows.cli import main; main()"]


@pytest.mark.slow
def test_what_the_command_prints(recorded: Path, leash: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = leash(recorded / "data", "verify", "one", "--json")
    output, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (0, "")
    printed = json.loads(output)
    assert printed["same"] is True
    assert [finding["verdict"] for finding in printed["findings"]] == ["same"]
    edit(recorded, "input.txt", "1", "2")
    process = leash(recorded, "verify", "one")
    output, errors = process.communicate(timeout=100)
    assert (process.returncode, output) == (2, "")
    assert errors.startswith("error: dvc.lock is not that of one")


@pytest.mark.slow
def test_a_stage_of_the_pipeline(finished: "Project") -> None:
    """A wrong hash in dvc.lock is found, the right ones beside it are confirmed; nothing is sent to MLflow."""
    lock = finished.root / "dvc.lock"
    text = lock.read_text(encoding="utf-8")
    right = text[text.index("    - path: plots/sft.csv") :].split("md5: ")[1][:32]
    lock.write_text(text.replace(right, "a" * 32), encoding="utf-8")
    for words in (("add", "--all"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "a run")):
        assert finished.run("git", *words).returncode == 0
    before = snapshot(finished.root)
    done = finished.run(sys.executable, "-m", "flows.cli", "verify", "sft")
    assert done.returncode == 1, done.stderr
    rows = {line.split()[1]: line.split()[2:] for line in done.stdout.splitlines() if line.startswith("sft    ")}
    assert rows["plots/sft.csv"] == ["a" * 8, right[:8], "DIFFERS"]
    assert [rows[out][-1] for out in ("models/sft", "metrics/sft.json")] == ["same", "same"]
    assert "DIFFERS: 1 of 4 outs; first in sft (CPU capability " in done.stdout.splitlines()[-1]
    assert snapshot(finished.root) == before
