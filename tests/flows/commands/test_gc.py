"""`leash gc`: what it prints, what stays, and that what stays can be restored."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flows import workspace
from flows.cli import main
from flows.commands import gc
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from rlhf_core.locks import FileLock
from tasks.naming import model_name
from tests.conftest import call, commit

if TYPE_CHECKING:
    from tests.conftest import Ended

GRAPH = """
stages:
  base:
    cmd: python -c "open('base.out', 'w').write('b' * 1000)"
    deps: [input.txt]
    outs: [base.out]
  policy:
    cmd: >-
      rm -rf policy && mkdir policy &&
      python -c "n = open('params.yaml').read().split()[-1]; open('policy/w', 'w').write(n * 100);
      open('m.json', 'w').write(n)"
    deps: [base.out]
    params: [a]
    outs: [policy]
    metrics: [m.json: {cache: false}]
"""


def dvc(root: Path, *words: str) -> str:
    return call(root, sys.executable, "-m", "dvc", *words)


def objects(root: Path) -> set[str]:
    return {path.parent.name + path.name for path in (root / ".dvc/cache/files/md5").rglob("*") if path.is_file()}


def experiments(root: Path) -> set[str]:
    return set(dvc(root, "exp", "list", "--name-only").split())


def experiment(root: Path, name: str, value: int) -> None:
    """An experiment in which `a` has this value; the checkout is afterwards as it was."""
    (root / "params.yaml").write_text(f"a: {value}\n")
    dvc(root, "repro", "--quiet")
    kind = "Nightly: main" if name.startswith("nightly") else f"Study: {name.removesuffix('-a=1')}"
    dvc(root, "exp", "save", "--quiet", "--force", "--name", name, "--message", f"{name}: a={value}\n\n{kind}")
    call(root, "git", "checkout", "--quiet", ".")
    dvc(root, "checkout", "--quiet")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with `a: 1` committed, three nightly experiments, one trial of study `s` and one of study `s-2`."""
    root = tmp_path_factory.mktemp("gc") / "toy"
    root.mkdir()
    call(root, "git", "init", "--quiet")
    dvc(root, "init", "--quiet")
    dvc(root, "config", "core.analytics", "false")
    for name, text in {"input.txt": "1\n", "params.yaml": "a: 1\n", "dvc.yaml": GRAPH}.items():
        (root / name).write_text(text)
    call(root, "git", "config", "user.name", "a")
    call(root, "git", "config", "user.email", "a@b")
    dvc(root, "repro", "--quiet")
    commit(root)
    for value, name in enumerate(("nightly-1", "nightly-2", "nightly-3", "s-a=1", "s-2-a=1"), start=2):
        experiment(root, name, value)
    (root / "work/studies/s").mkdir(parents=True)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    copy = Path(shutil.copytree(made, tmp_path / "toy", symlinks=True))
    shutil.copy2(database, copy / "mlflow.db")
    return copy


def table(printed: str) -> dict[str, list[str]]:
    """Run -> its other cells."""
    lines = [line.split("  ") for line in printed.splitlines() if "  " in line]
    return {cells[0]: [cell.strip() for cell in cells[1:] if cell.strip()] for cells in lines}


def test_without_yes_it_only_prints(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = objects(root)
    gc.gc(root, 2, [], False)
    printed = capsys.readouterr().out
    found = table(printed)
    directory = len('[{"md5": "01234567890123456789012345678901", "relpath": "w"}]')
    own = f"{100 + directory + 1} bytes"
    assert found["nightly-1"][1:] == [own, f"{1100 + directory + 1:,} bytes".replace("1,162 bytes", "1.2 kB"), "goes"]
    assert found["nightly-3"][1] == own
    assert found["nightly-3"][-1] != "goes"
    assert found["this checkout"][0] == "0 bytes", "the branch has the same"
    assert f"{own} of it is not needed" in printed
    assert printed.splitlines()[-1] == "nothing was removed; `leash gc --yes` removes what is marked"
    assert objects(root) == before
    assert len(experiments(root)) == 5


def test_what_stays_can_be_restored_and_the_rest_is_gone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = objects(root)
    gc.gc(root, 1, ["s"], True)
    printed = capsys.readouterr().out
    assert experiments(root) == {"nightly-3", "s-2-a=1"}
    assert len(before) - len(objects(root)) == 9
    assert printed.splitlines()[-1].startswith("removed 3 experiments and 9 objects, ")
    freed = printed.splitlines()[-1].split("objects, ")[1]
    assert f"; {freed} of it is not needed" in printed
    for value, name in ((4, "nightly-3"), (6, "s-2-a=1")):
        shutil.rmtree(root / "policy")
        dvc(root, "exp", "apply", name)
        assert (root / "policy/w").read_text() == str(value) * 100
        call(root, "git", "checkout", "--quiet", ".")
        (root / "params.yaml").write_text(f"a: {value}\n")
        assert "Stage 'policy' is cached - skipping run" in dvc(root, "repro"), "its metrics stay in the run cache"
        call(root, "git", "checkout", "--quiet", ".")
    (root / "params.yaml").write_text("a: 2\n")
    assert "Running stage 'policy'" in dvc(root, "repro")
    gc.gc(root, 1, ["s"], True)
    gc.gc(root, 1, ["s"], False)
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to remove"


def test_imported_data_of_every_commit_stay(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file and a folder, of which a later commit has other rows, and a file of a branch that a merge left out."""
    for version in ("1", "2"):
        for name in ("file", "folder/rows"):
            path = root / "data/raw" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {version}\n")
        dvc(root, "add", "--quiet", "data/raw/file", "data/raw/folder")
        call(root, "git", "add", "data/raw/file.dvc", "data/raw/folder.dvc")
        call(root, "git", "commit", "--quiet", "--message", version)
    call(root, "git", "checkout", "--quiet", "-b", "side")
    (root / "data/raw/side").write_text("side\n")
    dvc(root, "add", "--quiet", "data/raw/side")
    call(root, "git", "add", "data/raw/side.dvc")
    call(root, "git", "commit", "--quiet", "--message", "side")
    side = call(root, "git", "rev-parse", "HEAD").strip()
    call(root, "git", "checkout", "--quiet", "-")
    call(root, "git", "merge", "--quiet", "--strategy", "ours", "--no-edit", "side")
    call(root, "git", "branch", "--quiet", "--delete", "--force", "side")
    gc.gc(root, 0, ["s", "s-2"], True)
    assert "imported data and rounds of all commits" in capsys.readouterr().out
    call(root, "git", "checkout", "--quiet", "--force", side)
    (root / "data/raw/side").unlink(missing_ok=True)
    dvc(root, "checkout", "data/raw/side.dvc")
    assert (root / "data/raw/side").read_text() == "side\n"
    call(root, "git", "checkout", "--quiet", "--force", "HEAD~2")
    dvc(root, "checkout", "data/raw/file.dvc", "data/raw/folder.dvc")
    assert (root / "data/raw/file").read_text() == "file 1\n"
    assert (root / "data/raw/folder/rows").read_text() == "folder/rows 1\n"


def test_what_becomes_needed_meanwhile_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored while gc looks, and an old result that is applied then."""
    look, new = gc.examine, root / ".dvc/cache/files/md5/ab" / ("c" * 30)

    def slow(*values: Any) -> list[gc.Run]:
        found = look(*values)
        if not new.exists():
            new.parent.mkdir(exist_ok=True)
            new.touch()
            dvc(root, "exp", "apply", "nightly-1")
        return found

    monkeypatch.setattr(gc, "examine", slow)
    gc.gc(root, 1, ["s"], True)
    assert experiments(root) == {"nightly-3", "s-2-a=1"}
    assert new.exists()
    shutil.rmtree(root / "policy")
    dvc(root, "checkout")
    assert (root / "policy/w").read_text() == "2" * 100


@pytest.mark.slow
def test_branches_tags_and_tagged_experiments_stay(root: Path) -> None:
    dvc(root, "exp", "branch", "nightly-1", "kept")
    [ref] = call(root, "git", "for-each-ref", "--format=%(objectname)", "refs/exps/*/*/nightly-2").split()
    call(root, "git", "-c", "user.name=a", "-c", "user.email=a@b", "tag", "-m", "good", "good", ref)
    before = objects(root)
    gc.gc(root, 0, [], True)
    assert experiments(root) == {"nightly-2", "s-a=1", "s-2-a=1"}
    assert len(before) - len(objects(root)) == 3, "of nightly-3"
    call(root, "git", "checkout", "--quiet", "kept")
    dvc(root, "checkout")
    assert (root / "policy/w").read_text() == "2" * 100


def test_the_champion_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    client.create_registered_model(model_name(root))
    digests = []
    for name in ("nightly-1", "nightly-2"):
        [ref] = call(root, "git", "for-each-ref", "--format=%(objectname)", f"refs/exps/*/*/{name}").split()
        lines = call(root, "git", "show", f"{ref}:dvc.lock").splitlines()
        digests += [line.split()[-1] for line in lines if line.endswith(".dir")]
        client.create_model_version(model_name(root), f"dvc://models/policy?md5={digests[-1]}&project=/a/clone")
    client.set_registered_model_alias(model_name(root), "champion", "2")
    client.set_model_version_tag(model_name(root), "2", "leash.champion_before", "1")
    gc.gc(root, 0, [], True)
    printed = capsys.readouterr().out
    assert f"{model_name(root)} version 2 (champion)" in printed
    assert f"{model_name(root)} version 1 (champion before)" in printed, "leash promote --undo needs it"
    assert set(digests) < objects(root)
    assert len(objects(root)) == 19 - 3 - 2, (
        "without one nightly run, and the metrics of the champion and the one before"
    )


def test_without_the_database_nothing_is_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The nightly runs were tracked elsewhere: this process does not know the champion."""
    (root / "mlflow.db").unlink()
    before = objects(root)
    with pytest.raises(
        UserError, match=r"mlflow.db does not exist, so the champion is unknown; set MLFLOW_TRACKING_URI"
    ):
        gc.gc(root, 0, [], True)
    assert (objects(root), len(experiments(root))) == (before, 5)


@pytest.mark.slow
def test_experiments_of_people_stay(root: Path) -> None:
    """Whatever their names are."""
    dvc(root, "exp", "save", "--quiet", "--force", "--name", "nightly-mine")
    dvc(root, "exp", "save", "--quiet", "--force", "--name", "s-mine")
    gc.gc(root, 0, ["s", "s-2"], True)
    assert experiments(root) == {"nightly-mine", "s-mine"}


def test_mlflow_that_does_not_answer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match="MLflow does not answer for the registered policy") as refused:
        gc.gc(root, 0, [], True)
    assert "secret" not in str(refused.value)
    assert len(experiments(root)) == 5


@pytest.mark.slow
def test_a_workspace_that_was_kept_keeps_its_objects_and_one_at_work_refuses(root: Path) -> None:
    space = Workspace(root, "trial", workspace.resolve(root, "HEAD"), ("a=9",))
    with workspace.opened(space):
        dvc(space.root, "repro", "--quiet")
        with pytest.raises(UserError, match=f"process {os.getpid()} works in work/runs/trial; wait for its end"):
            gc.gc(root, 0, [], True)
        assert len(experiments(root)) == 5
    with workspace.opened(Workspace(root, workspace.SERVE, space.commit)):
        gc.gc(root, 0, [], True)
    shutil.rmtree(space.root / "policy")
    dvc(space.root, "checkout")
    assert (space.root / "policy/w").read_text() == "9" * 100


def test_a_stage_at_work_refuses(root: Path) -> None:
    lock = FileLock(root / "work/policy.lock")
    assert lock.acquire()
    with pytest.raises(UserError, match=f"process {os.getpid()} runs a stage"):
        gc.gc(root, 0, [], True)
    lock.release()


def test_no_workspace_is_opened_meanwhile(root: Path) -> None:
    lock = FileLock(root / workspace.GC)
    assert lock.acquire()
    threading.Timer(1.0, lock.release).start()
    began = time.monotonic()
    with workspace.opened(Workspace(root, "trial", workspace.resolve(root, "HEAD"))):
        assert time.monotonic() - began > 0.9


def test_refusals(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--studies x: there are experiments of s, s-2"):
        gc.gc(root, 0, ["x"], False)
    dvc(root, "cache", "dir", "--local", str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match=r"elsewhere.* is outside of this project"):
        gc.gc(root, 0, [], True)


def test_the_command(root: Path, in_process: Callable[..., "Ended"], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["leash", "gc", "--keep", "1"])
    ended = in_process(root, main)
    assert "nightly-1" in ended.stdout
    assert (ended.code, ended.stderr) == (0, "")
    monkeypatch.setattr(sys, "argv", ["leash", "gc", "--studies", "x"])
    ended = in_process(root, main)
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
