"""`leash lineage`: from a result to the raw data by hash, through dvc.lock, provenance and DVC's cache."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flows.commands.lineage import Lineage, Node, lineage, show
from rlhf_core.errors import UserError
from tasks.records.recorded import Record
from tasks.stage.dvc_files import open_project
from tests.conftest import call

if TYPE_CHECKING:
    from tests.conftest import Project

GRAPH = """
stages:
  ingest:
    cmd: python worker.py data/one.txt data/raw/set.txt
    deps: [data/raw, tasks/code.py]
    params: [ingest, seed]
    outs: [data/one.txt]
  two:
    cmd: python worker.py data/two.txt data/one.txt
    deps: [data/one.txt]
    outs: [data/two.txt]
"""
WORKER = """
import pathlib, sys

out, *deps = sys.argv[1:]
pathlib.Path(out).write_text(out + "".join(pathlib.Path(dep).read_text() for dep in deps))
"""


@pytest.fixture(scope="module")
def finished_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with tracked raw data and two stages."""
    root = tmp_path_factory.mktemp("lineage")
    files = {"dvc.yaml": GRAPH, "worker.py": WORKER, "tasks/code.py": "1\n", "data/raw/set.txt": "new\n"}
    for name, text in (files | {"params.yaml": "seed: 3\ningest: {source: files, long: null}\n"}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    call(root, "git", "init", "--quiet")
    dvc(root, "init", "--quiet")
    dvc(root, "add", "--quiet", "data/raw/set.txt")
    dvc(root, "repro")
    return root


@pytest.fixture
def root(finished_toy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_toy, tmp_path / "toy", symlinks=True))


def md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


def dvc(root: Path, *words: str) -> None:
    call(root, sys.executable, "-m", "dvc", *words)


def below(node: Node) -> dict[str, str]:
    """Path → state of everything in the tree."""
    return {node.path: node.state} | {path: state for child in node.inputs for path, state in below(child).items()}


def test_back_to_the_raw_data(root: Path) -> None:
    tree = lineage(root, root / "data/two.txt")
    assert below(tree) == dict.fromkeys(["data/two.txt", "data/one.txt", "data/raw", "data/raw/set.txt"], "as recorded")
    one = tree.inputs[0]
    assert one.record is not None
    assert (one.record.stage, one.record.params["seed"], one.record.source) == ("ingest", 3, "dvc.lock")
    [raw] = one.inputs
    [data] = raw.inputs
    assert (data.digest, data.notes) == (md5("new\n"), ("tracked by data/raw/set.txt.dvc",))


def test_what_is_printed(root: Path) -> None:
    (root / "tasks/code.py").write_text("2\n", encoding="utf-8")
    content, text = show(root, root / "data/two.txt")
    lines = text.splitlines()
    assert lines[0] == f"data/two.txt  {content['digest'][:8]}  as recorded  made by two"
    assert f"└─ data/one.txt  {content['inputs'][0]['digest'][:8]}  as recorded  made by ingest" in lines
    assert "   │ ingest.source=files seed=3" in lines
    assert "   │ its code has changed since: tasks/code.py" in lines
    assert lines[-1].strip() == "tracked by data/raw/set.txt.dvc"


@pytest.mark.parametrize(
    ("damage", "path", "state"),
    [
        (lambda root: (root / "data/one.txt").write_text("by hand"), "data/one.txt", "changed since"),
        (lambda root: (root / "data/two.txt").write_text("by hand"), "data/two.txt", "changed since"),
        (lambda root: (root / "data/one.txt").unlink(), "data/one.txt", "missing"),
        (lambda root: (root / "data/raw/more.txt").write_text("more"), "data/raw", "changed since"),
    ],
)
def test_the_state_of_each_file(root: Path, damage: Callable[[Path], object], path: str, state: str) -> None:
    damage(root)
    states = below(lineage(root, root / "data/two.txt"))
    assert states[path] == state
    assert {name for name, found in states.items() if found != "as recorded"} == {path}


def test_an_output_that_dvc_lock_does_not_name_is_refused(root: Path) -> None:
    (root / "dvc.lock").unlink()
    with pytest.raises(UserError, match=r"dvc\.lock does not name it"):
        lineage(root, root / "data/two.txt")


def test_what_is_recorded_nowhere_is_unknown(root: Path) -> None:
    with open_project(root) as project:
        node = Lineage(project).node("data/one.txt", "0" * 32)
    assert (node.record, node.inputs, node.state) == (None, (), "changed since")
    assert node.notes[0].startswith("unknown: ")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            "worker.py",
            r"worker\.py: neither made by a stage nor a copy of a model; results are in data$",
        ),
        ("data/tow.txt", r"tow\.txt: file not found; did you mean data/two\.txt, data/one\.txt\?$"),
        ("one", r"one: file not found; did you mean data/one\.txt\?$"),
    ],
)
def test_what_no_stage_makes_is_refused(root: Path, path: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        lineage(root, root / path)


@pytest.mark.parametrize(
    ("stage", "params", "path", "digest"),
    [
        ("ingest", {"source": "huggingface", "huggingface": {"dataset": "a/b", "revision": "c" * 40}}, "a/b", "c" * 40),
        ("base", {"source": "pretrained", "pretrained": {"model": "a/m", "revision": "d" * 40}}, "a/m", "d" * 40),
    ],
)
def test_a_hub_is_named_with_its_revision(
    root: Path, stage: str, params: dict[str, Any], path: str, digest: str
) -> None:
    record = Record(stage, "python", {stage: params}, {}, {}, {}, "dvc.lock")
    with open_project(root) as project:
        [origin] = Lineage(project)._origins(record)
    assert (origin.path, origin.digest, origin.state) == (path, digest, "unknown here")


def test_the_command(root: Path, leash: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = leash(root / "data", "lineage", "two.txt", "--json")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert json.loads(output)["inputs"][0]["path"] == "data/one.txt"
    process = leash(root, "lineage", "nothing")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors.count("\n")) == (2, "", 1)


def test_a_policy_and_its_copy_elsewhere(finished: "Project", tmp_path: Path) -> None:
    """The copy is known by its bytes, or by the provenance that was copied with it."""
    policy = lineage(finished.root, finished.root / "models/policy")
    assert policy.record is not None
    assert policy.record.source == "provenance.json"
    states = below(policy)
    assert set(states.values()) == {"as recorded"}
    assert states.keys() >= {"models/reward", "models/sft", "models/base", "data/raw", "the built-in demo world"}

    copied = tmp_path / "copied"
    shutil.copytree(finished.root / "models/policy", copied)
    assert lineage(finished.root, copied).notes == ("is models/policy of dvc.lock",)
    (finished.root / "dvc.lock").unlink()
    with pytest.raises(UserError, match="neither made by a stage nor a copy of a model"):
        lineage(finished.root, copied)
    shutil.copy2(finished.root / "models/policy.provenance.json", tmp_path / "copied.provenance.json")
    shutil.rmtree(finished.root / "models/sft")
    tree = lineage(finished.root, copied)
    assert tree.state == "unknown here"
    assert [node.state for node in tree.inputs if node.path == "models/sft"] == ["missing"]
    (copied / "config.json").write_text("{}", encoding="utf-8")
    assert "changed since it was made" in lineage(finished.root, copied).notes[0]
