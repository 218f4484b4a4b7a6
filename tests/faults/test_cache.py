"""Damaged files in DVC's cache: what DVC notices, and what Leash notices."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flows.commands.doctor import Check, examine
from flows.graph import read_graph
from flows.stages import EXECUTED, RESTORED, UP_TO_DATE, StageUserError, run_stage
from rlhf_core.errors import UserError
from tasks.stage.dvc_files import open_project
from tests.conftest import call, write_graph

if TYPE_CHECKING:
    from tests.conftest import Project

STAGES: dict[str, tuple[str, list[str]]] = {"one": ("work", []), "two": ("work", ["one"])}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, empty_project: Path) -> Path:
    """A toy project that is up to date."""
    folder = Path(shutil.copytree(empty_project, tmp_path_factory.mktemp("cache") / "toy"))
    write_graph(folder, STAGES)
    call(folder, sys.executable, "-m", "dvc", "repro")
    return folder


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """A copy of it to work on, with a copy of its lock file beside it."""
    shutil.copy(template / "dvc.lock", tmp_path / "dvc.lock")
    return Path(shutil.copytree(template, tmp_path / "toy", symlinks=True))


def object_of(root: Path, out: str) -> Path:
    """The cached file of an output, or of the file `folder/name` in one that is a folder."""
    with open_project(root) as project:
        (found,) = [one for stage in project.stages for one in stage.outs if out.startswith(one.path)]
        return dict(project.cached(found.recorded or ""))[out.removeprefix(found.path).removeprefix("/")]


def damage(path: Path, kind: str) -> None:
    """`flip` a bit or `cut` the file in two, keeping mode and times as a failing disk does; or `remove` it."""
    if kind == "remove":
        path.unlink()
        return
    before, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content[: len(content) // 2] if kind == "cut" else content)
    path.chmod(before.st_mode)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def state(root: Path, stage: str) -> str:
    return run_stage(root, stage, False, None, print).state


def finding(root: Path, name: str) -> Check:
    (check,) = [check for check in examine(root) if check.name == name]
    return check


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flip", "cut"])
def test_a_damaged_object_is_not_restored(kind: str, root: Path) -> None:
    corrupt = object_of(root, "one.out")
    assert finding(root, "cache").verdict == "ok"
    damage(corrupt, kind)
    (root / "one.out").unlink()
    place = corrupt.relative_to(root).as_posix()
    for _ in range(2):  # the second time, too: DVC would call the wrong bytes up to date
        with pytest.raises(StageUserError, match=r"one: DVC's cache is damaged and gave one.out wrong bytes") as caught:
            state(root, "one")
        assert f"`rm -f {place}`" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not (root / "one.out").exists()
    check = finding(root, "cache")
    assert check.verdict == "BROKEN"
    assert f"rm -f {place}" in check.advice
    corrupt.unlink()
    assert state(root, "one") == EXECUTED
    assert state(root, "two") == UP_TO_DATE
    assert (root / "one.out").read_text() == "one1\n"
    assert (root / "dvc.lock").read_bytes() == (root.parent / "dvc.lock").read_bytes()
    assert finding(root, "cache").verdict == "ok"


def test_a_removed_object_is_made_again(root: Path, serial: Callable[[Path], None]) -> None:
    damage(object_of(root, "one.out"), "remove")
    serial(root)
    assert object_of(root, "one.out").exists()
    assert (root / "dvc.lock").read_bytes() == (root.parent / "dvc.lock").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "a: [", "stages: 3\n"])
def test_a_broken_entry_of_the_run_cache(text: str, root: Path) -> None:
    for entry in (root / ".dvc" / "cache" / "runs").rglob("*"):
        if entry.is_file():
            entry.write_text(text)
    (root / "one.out").unlink()
    assert state(root, "one") == RESTORED
    assert (root / "dvc.lock").read_bytes() == (root.parent / "dvc.lock").read_bytes()


def test_wrong_bytes_in_an_input_stop_the_stage_that_reads_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    (root / "work").mkdir(exist_ok=True)  # the folder of the remembered hashes
    with open_project(root) as project:
        right = project.stage("two").hashes()
    time.sleep(0.2)
    with open_project(root) as project:
        assert project.stage("two").hashes() == right
    damage(root / "one.out", "flip")  # DVC trusts size, times and inode
    with open_project(root) as project:
        (out,) = [one for stage in project.stages for one in stage.outs if one.path == "one.out"]
        assert out.known_hash() == right["one.out"]
        assert out.known_hash(read=True) != right["one.out"]
        with pytest.raises(UserError, match=r"^one.out: other bytes than DVC has noted.*`rm -r one.out` and run again"):
            project.stage("two").require_intact(right, recorded=True)
    assert finding(root, "outputs").found == "other bytes than dvc.lock names: one.out"
    (root / "one.out").unlink()
    assert state(root, "one") == RESTORED
    with open_project(root) as project:
        assert project.stage("two").hashes() == right


@pytest.mark.slow
def test_a_damaged_model(finished: "Project") -> None:
    """Through `dvc repro` alone: wrong bytes come back unnoticed, and the next stage that reads them refuses them."""
    corrupt = object_of(finished.root, "models/policy/model.safetensors")
    damage(corrupt, "flip")
    shutil.rmtree(finished.root / "models" / "policy")
    assert finished.repro() == []
    finished.set("evaluate.bootstrap", 201)
    done = finished.run(sys.executable, "-m", "dvc", "repro", "evaluate")
    assert "evaluate: models/policy: other bytes than DVC has noted" in done.stdout + done.stderr
    assert done.returncode != 0
    check = finding(finished.root, "cache")
    assert corrupt.relative_to(finished.root).as_posix() in check.advice
    assert finding(finished.root, "outputs").found == "other bytes than dvc.lock names: models/policy"


def test_every_input_has_the_hash_of_dvc(finished: "Project", monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, folders, code: our reading of the bytes and DVC's rules are the same."""
    monkeypatch.chdir(finished.root)
    with open_project(finished.root) as project:
        for stage in read_graph(finished.root).stages:
            definition = project.stage(stage)
            definition.require_intact(definition.hashes(), recorded=True)
