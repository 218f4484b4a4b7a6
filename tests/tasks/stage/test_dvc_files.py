"""DVC's files: hashes and order as DVC's, dvc.lock while another process rewrites it, errors in one line."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_core.errors import UserError
from tasks.stage import dvc_files
from tasks.stage.dvc_files import Stored, open_project, read_lock_file, recorded_order

ROOT = Path(__file__).resolve().parents[3]
GRAPH = """
stages:
  first:
    cmd: cp input.txt first.txt
    deps: [input.txt]
    outs: [first.txt]
  second:
    cmd: cp first.txt second.txt
    deps: [first.txt]
    params: [seed]
    outs: [second.txt]
  third:
    cmd: python third.py
    deps: [second.txt]
    outs: [third.txt]
"""
SLOW_DVC = """
import io, sys, time
from dvc.utils.serialize import _common

def slowly(path, data, dumper, fs=None, **options):
    text = io.StringIO()
    dumper(data, text, **options)
    with open(path, "w", encoding="utf-8") as file:  # in place, as DVC does
        for part in text.getvalue().split("path:")[:-1]:
            file.write(part + "path:")
            file.flush()
            print("writing", flush=True)
            time.sleep(float(sys.argv[1]))
        file.write(text.getvalue().rpartition("path:")[2])

_common._dump_data = slowly
from dvc.cli import main
sys.exit(main(["repro", "--single-item", "--force", "first"]))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project whose stages `first` and `second` are recorded."""
    files = {".dvc/config": "[core]\n    no_scm = true\n    analytics = false\n", "dvc.yaml": GRAPH}
    for name, text in (files | {"params.yaml": "seed: 1\n", "input.txt": "1\n"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "dvc", "repro", "--quiet", "second"], cwd=tmp_path, check=True)
    return tmp_path


def rewriting(root: Path, pause: float = 1.0) -> subprocess.Popen[str]:
    """A DVC that has begun to rewrite dvc.lock and waits `pause` seconds after each of its four parts."""
    command = [sys.executable, "-c", SLOW_DVC, str(pause)]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "writing" not in process.stdout.readline():
        assert process.poll() is None
    return process


@pytest.mark.slow
def test_a_project_is_never_read_in_the_middle_of_a_rewrite(root: Path) -> None:
    whole = (root / "dvc.lock").read_text(encoding="utf-8")
    writer = rewriting(root, pause=0.5)
    try:
        assert (root / "dvc.lock").read_text(encoding="utf-8") != whole, "the writer is not in the middle"
        with open_project(root) as project:
            assert all(file.recorded for file in project.stages[1].inputs)
            assert not project.stages[1].command_changed
        assert writer.wait(timeout=30) == 0
        assert (root / "dvc.lock").read_text(encoding="utf-8") == whole
    finally:
        writer.kill()


def test_a_stage_that_starts_in_the_middle_of_a_rewrite(root: Path) -> None:
    """The process of `python -m tasks <stage>`, begun while another stage's DVC writes."""
    (root / "third.py").write_text(
        "from rlhf_core.config.block import Block\nfrom tasks.stage.run import run\n"
        "run('third', Block, lambda: lambda stage: stage.out('third.txt').write_text('3'))\n",
        encoding="utf-8",
    )
    (root / "params.yaml").write_text(
        "seed: 1\nthreads: 1\nlong_rows: refuse\nruntime: {tracking: false}\n", encoding="utf-8"
    )
    writer = rewriting(root)
    try:
        done = subprocess.run(
            [sys.executable, "third.py"], cwd=root, env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert (root / "third.txt").read_text(encoding="utf-8") == "3"
    finally:
        writer.wait(timeout=30)


@pytest.mark.slow
def test_the_text_and_the_order_of_the_lock_file_wait_for_the_writer_too(root: Path) -> None:
    whole = (root / "dvc.lock").read_text(encoding="utf-8")
    for read, expected in ((read_lock_file, whole), (recorded_order, ("first", "second"))):
        writer = rewriting(root, pause=0.2)
        try:
            assert read(root) == expected
        finally:
            writer.wait(timeout=30)


@pytest.mark.slow
def test_a_lock_that_is_never_given_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dvc_files, "PATIENCE_SECONDS", 0.0)
    writer = rewriting(root)
    try:
        begin = time.monotonic()
        writer.send_signal(19)  # SIGSTOP: it holds the lock and does not go on
        with pytest.raises(UserError, match="another DVC process has held this lock"), open_project(root):
            pass
        assert time.monotonic() - begin < 20
    finally:
        writer.kill()
        writer.wait()


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("dvc.yaml", "stages: 3\n", "dvc.yaml: `stages` is no mapping"),
        ("dvc.lock", "stages: 3\n", r"dvc.lock is broken .*`git checkout dvc.lock` brings back"),
    ],
)
def test_a_file_that_dvc_cannot_read(root: Path, file: str, text: str, says: str) -> None:
    (root / file).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=says) as error, open_project(root):
        pass
    assert "\n" not in str(error.value)


TREE = {
    "file": "text\n", "empty": "", "crlf": "a\r\nb\r\n", "with space": "1", "naïve-文": "2",
    "folder/b": "1", "folder/a/z": "2", "folder/a b": "3", "folder/a-b": "4", "folder/é": "5",
    "folder/__pycache__/x.pyc": "6", "folder/notes.tmp": "7", "folder/deep/kept.tmp": "8", "folder/deep/skip": "9",
    "folder/README.md": "10", "folder/.git": "11", "ignored/only.tmp": "1",
}  # fmt: skip
IGNORED = "__pycache__\n*.tmp\n# a comment\n\n/folder/README.md\n!kept.tmp\n"


def test_hashes_are_those_of_dvc(root: Path) -> None:
    """Of files and folders: empty, with spaces, not ASCII, linked, with files that .dvcignore names."""
    for name, text in TREE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    (root / "folder/nothing").mkdir()
    (root / "hollow").mkdir()
    (root / "folder/link").symlink_to("b")
    (root / "folder/linked").symlink_to("deep")
    (root / ".dvcignore").write_text(IGNORED, encoding="utf-8")
    deps = [name for name in TREE if "/" not in name] + ["folder", "hollow", "ignored"]
    graph = {"stages": {"all": {"cmd": "true", "deps": deps}}}
    (root / "dvc.yaml").write_text(json.dumps(graph), encoding="utf-8")
    (root / "dvc.lock").unlink()
    subprocess.run([sys.executable, "-m", "dvc", "repro", "--quiet"], cwd=root, check=True)
    with open_project(root) as project:
        (stage,) = project.stages
        assert {file.path: file.recorded for file in stage.inputs} == {
            file.path: file.known_hash() for file in stage.inputs
        }
        assert all(file.recorded for file in stage.inputs)
        assert not stage.command_changed


def test_a_hash_is_remembered_until_the_file_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "work").mkdir()
    time.sleep(2 * dvc_files.SETTLED_SECONDS)
    read: list[Path] = []
    real = dvc_files.md5_of
    monkeypatch.setattr(dvc_files, "md5_of", lambda path: read.append(path) or real(path))
    first = real(root / "input.txt")

    def known(thorough: bool = False) -> str:
        with open_project(root) as project:
            (file,) = project.stages[0].inputs
            return file.known_hash(read=thorough)

    assert (known(), known(), len(read)) == (first, first, 1)
    assert (known(thorough=True), len(read)) == (first, 2), "a check of the bytes reads them"
    (root / "input.txt").write_text("2\n", encoding="utf-8")
    assert known() == real(root / "input.txt") != first
    (root / "work/hashes.json").write_text("[", encoding="utf-8")
    assert known() == real(root / "input.txt")


@pytest.mark.parametrize("where", ["config", "config.local"])
def test_the_cache_is_where_dvc_is_configured_to_have_it(root: Path, where: str) -> None:
    assert dvc_files.cache_folder(root) == root / ".dvc/cache/files/md5"
    level = "--local" if where == "config.local" else "--project"
    for folder, expected in (("../else where", root.parent / "else where"), ("/a/b", Path("/a/b"))):
        value = str((root / folder).resolve()) if folder.startswith("/") else folder
        subprocess.run([sys.executable, "-m", "dvc", "cache", "dir", level, value], cwd=root, check=True)
        assert dvc_files.cache_folder(root) == expected / "files/md5"


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("dvc.yaml", "stages:\n  a:\n    foreach: [1, 2]\n    do: {cmd: echo}\n", "stage a uses `foreach`"),
        ("dvc.yaml", "stages: {a: {cmd: echo, params: [{more.yaml: }]}}\n", "stage a has all of more.yaml"),
        ("sub/.dvcignore", "skip\n", "sub/.dvcignore: only that of the project is read"),
    ],
)
def test_what_is_not_read_is_refused(root: Path, file: str, text: str, says: str) -> None:
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=says), open_project(root):
        pass


def test_stages_that_need_each_other_are_refused(root: Path) -> None:
    (root / "dvc.yaml").write_text(
        "stages:\n  a: {cmd: echo, deps: [b], outs: [a]}\n  b: {cmd: echo, deps: [a], outs: [b]}\n", encoding="utf-8"
    )
    with open_project(root) as project, pytest.raises(UserError, match="a ← b ← a"):
        project.plan()


def test_a_parameter_that_is_no_longer_tracked_has_not_changed(root: Path) -> None:
    (root / "dvc.yaml").write_text(GRAPH.replace("params: [seed]", "params: [other]"), encoding="utf-8")
    (root / "params.yaml").write_text("seed: 2\nother: 1\n", encoding="utf-8")
    with open_project(root) as project:
        stage = project.stage("second")
        assert (stage.present_params(), stage.recorded_params) == ({"other": 1}, {})


def test_a_copy_with_other_bytes_than_the_cache_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = tmp_path / "90" / "0150983cd24fb0d6963f7d28e17f72"
    blob.parent.mkdir()
    blob.write_bytes(b"abc")
    Stored(blob).copy(tmp_path / "right")
    assert (tmp_path / "right").read_bytes() == b"abc"
    monkeypatch.setattr(shutil, "copyfile", lambda source, target: target.write_bytes(b"abd"))
    with pytest.raises(UserError, match="other bytes than"):
        Stored(blob).copy(tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
