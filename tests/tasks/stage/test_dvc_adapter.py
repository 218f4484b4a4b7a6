"""DVC through its adapter: dvc.lock while another process rewrites it, renamed internals, errors in one line."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_core.errors import UserError
from tasks.stage import dvc_adapter
from tasks.stage.dvc_adapter import open_project, read_lock_file, recorded_order

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
            time.sleep(1)
        file.write(text.getvalue().rpartition("path:")[2])

_common._dump_data = slowly
from dvc.cli import main
sys.exit(main(["repro", "--single-item", "--force", sys.argv[1]]))
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


def rewriting(root: Path) -> subprocess.Popen[str]:
    """A DVC that has begun to rewrite dvc.lock and takes seconds for it."""
    process = subprocess.Popen([sys.executable, "-c", SLOW_DVC, "first"], cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "writing" not in process.stdout.readline():
        assert process.poll() is None
    return process


@pytest.mark.slow
def test_a_project_is_never_read_in_the_middle_of_a_rewrite(root: Path) -> None:
    whole = (root / "dvc.lock").read_text(encoding="utf-8")
    writer = rewriting(root)
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
        writer = rewriting(root)
        try:
            assert read(root) == expected
        finally:
            writer.wait(timeout=30)


@pytest.mark.slow
def test_a_lock_that_is_never_given_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dvc_adapter, "PATIENCE_SECONDS", 0.0)
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


def test_a_changed_dvc_fails_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    dvc_adapter.check_dvc()
    monkeypatch.setitem(dvc_adapter.ATTRIBUTES, dvc_adapter.Output, ("get_hash", "gone"))
    monkeypatch.setitem(dvc_adapter.PARAMETERS, dvc_adapter.plan_repro, ("graph", "targets"))
    with pytest.raises(ImportError, match=r"uses: dvc\.output\.Output\.gone, .*plan_repro\(targets\)") as error:
        dvc_adapter.check_dvc()
    assert "\n" not in str(error.value)


def test_dvc_is_imported_in_one_module_only() -> None:
    files = [path for folder in ("tasks", "flows") for path in (ROOT / folder).rglob("*.py")]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith(("from dvc", "import dvc"))
    }
    assert found == {"tasks/stage/dvc_adapter.py"}


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("dvc.yaml", "stages: 3\n", "dvc.yaml: DVC cannot read the graph: "),
        ("dvc.lock", "stages: 3\n", r"dvc.lock is broken .*`git checkout dvc.lock` brings back"),
    ],
)
def test_a_file_that_dvc_cannot_read(root: Path, file: str, text: str, says: str) -> None:
    (root / file).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=says) as error, open_project(root):
        pass
    assert "\n" not in str(error.value)
