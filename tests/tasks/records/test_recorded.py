"""The results of a commit: what git has of it, and what DVC's cache or remote has."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_core.errors import UserError
from tasks.records.recorded import outs_of, read_results
from tests.conftest import call, commit

GRAPH = """
stages:
  one:
    cmd: mkdir -p metrics plots; touch plots/one.csv; cp input.txt metrics/one.json; echo {} > metrics/summary.json
    deps: [input.txt]
    outs: [metrics/one.json, plots/one.csv]
    metrics: [metrics/summary.json: {cache: false}]
"""


@pytest.fixture
def project(toy: Callable[..., Path]) -> Path:
    """A project with results of two commits; the first one, tagged `old`, has all of them in git."""
    root = toy({})
    (root / "dvc.yaml").write_text(
        GRAPH.replace("outs: [metrics/one.json,", "outs: [metrics/one.json: {cache: false},")
    )
    dvc(root, "repro")
    commit(root)
    call(root, "git", "tag", "old")
    call(root, "git", "rm", "--quiet", "--cached", "metrics/one.json")
    (root / "dvc.yaml").write_text(GRAPH)
    (root / "input.txt").write_text("new\n")
    dvc(root, "repro")
    commit(root)
    return root


def dvc(root: Path, *words: str) -> None:
    call(root, sys.executable, "-m", "dvc", *words)


def test_results_come_from_git_and_from_the_cache(project: Path) -> None:
    everything = {"metrics/one.json": b"new\n", "metrics/summary.json": b"{}\n", "plots/one.csv": b""}
    (project / "metrics/one.json").unlink()
    assert "metrics/one.json" not in call(project, "git", "ls-files")
    assert read_results(project, "HEAD", "metrics", "plots") == everything
    assert read_results(project, "HEAD", "metrics/one.json") == {"metrics/one.json": b"new\n"}
    assert read_results(project, "HEAD", "metrics/on") == {}
    shutil.rmtree(project / ".dvc/cache")
    assert read_results(project, "old", "metrics/one.json") == {"metrics/one.json": b"1\n"}, "in git"


def test_what_the_cache_lacks_comes_from_the_remote(project: Path, tmp_path: Path) -> None:
    dvc(project, "remote", "add", "--default", "store", str(tmp_path / "store"))
    dvc(project, "push")
    commit(project)
    call(tmp_path, "git", "clone", "--quiet", str(project), "clone")
    clone = tmp_path / "clone"
    assert read_results(clone, "HEAD", "metrics/one.json") == {"metrics/one.json": b"new\n"}
    digest = outs_of(clone, "HEAD")["metrics/one.json"]
    assert [path.parent.name + path.name for path in clone.rglob("files/md5/*/*")] == [digest]


def test_what_neither_has_is_an_error(project: Path) -> None:
    digest = outs_of(project, "HEAD")["metrics/one.json"]
    blob = project / ".dvc/cache/files/md5" / digest[:2] / digest[2:]
    blob.chmod(0o644)
    blob.write_text("other\n")
    with pytest.raises(UserError, match="other bytes than those of its hash"):
        read_results(project, "HEAD", "metrics/one.json")
    blob.unlink()
    with pytest.raises(UserError, match=r"metrics/one\.json of HEAD: neither DVC's cache nor its default remote"):
        read_results(project, "HEAD", "metrics/one.json")


def test_a_commit_without_a_lock_file_has_no_outputs(project: Path) -> None:
    (project / "dvc.lock").unlink()
    commit(project)
    assert outs_of(project, "HEAD") == {}
    assert json.loads(read_results(project, "HEAD", "metrics/summary.json")["metrics/summary.json"]) == {}
