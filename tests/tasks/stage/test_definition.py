"""A stage as dvc.yaml defines it."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import UserError
from tasks.stage.definition import git, git_state, require_untracked
from tasks.stage.dvc_files import digest, open_project

GRAPH = """
stages:
  first:
    cmd: python first.py
    deps: [data/raw]
    params: [first]
    outs: [middle.txt]
  second:
    cmd: python second.py
    deps: [middle.txt, code.py]
    params: [second, seed]
    outs: [model]
    metrics: [{metrics/second.json: {cache: false}}]
    plots: [{plots/second.csv: {cache: false}}]
"""
PARAMS: dict[str, Any] = {"seed": 1, "runtime": {"tracking": True}, "first": {"a": {"b": 1}}, "second": {"c": 2}}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {".dvc/config": "[core]\n    no_scm = true\n", "dvc.yaml": GRAPH, "code.py": "", "middle.txt": "1"}
    for name, text in (files | {"data/raw/set/train.jsonl": "{}\n", "params.yaml": "seed: 1\n"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_inputs_outs_and_parameters_come_from_dvc_yaml(root: Path) -> None:
    with open_project(root) as project:
        second = project.stage("second")
        assert [file.path for file in second.inputs] == ["middle.txt", "code.py"]
        assert sorted(out.path for out in second.outs) == ["metrics/second.json", "model", "plots/second.csv"]
        assert second.tracked(PARAMS) == {"second": {"c": 2}, "seed": 1}
        assert second.hashes().keys() == {"middle.txt", "code.py"}


def test_users_errors(root: Path) -> None:
    (root / "middle.txt").unlink()
    with open_project(root) as project:
        with pytest.raises(UserError, match="no stage named third"):
            project.stage("third")
        with pytest.raises(UserError, match=r"^middle.txt: file not found; `dvc repro second` makes"):
            project.stage("second").hashes()
        with pytest.raises(UserError, match=r"^params.yaml: second: missing parameter"):
            project.stage("second").tracked({"seed": 1})


def test_equal_content_has_one_digest_whatever_its_order() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    assert digest({"a": [1, 2]}) != digest({"a": [2, 1]})


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent.resolve()))

    def git(*words: str) -> None:
        names = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
        subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True)

    assert git_state(tmp_path) == (None, False)
    git("init")
    assert git_state(tmp_path) == (None, False)
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "--message", "a")
    (tmp_path / "untracked").write_text("1")
    commit, dirty = git_state(tmp_path)
    assert (len(commit or ""), dirty) == (40, False)
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == (commit, True)


def test_an_output_that_git_tracks_is_refused_before_the_stage(tmp_path: Path) -> None:
    """As on a branch that `dvc exp branch` made: DVC adds the files of pictures to an experiment's commit."""
    require_untracked(tmp_path, ["plots/ppo.csv"])  # no repository
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / "models/ppo").mkdir(parents=True)
    (tmp_path / "models/ppo/config.json").write_text("{}")
    require_untracked(tmp_path, ["plots/ppo.csv", "models/ppo"])
    subprocess.run(["git", "add", "--all"], cwd=tmp_path, check=True)
    require_untracked(tmp_path, ["plots/ppo.csv", "models/pp"])
    require_untracked(tmp_path, [])
    with pytest.raises(UserError, match=r"git tracks models/ppo/config.json.*`git rm -r --cached models/ppo`"):
        require_untracked(tmp_path, ["plots/ppo.csv", "models/ppo"])


def test_what_a_run_writes_is_no_uncommitted_change(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        names = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
        subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    written = ("dvc.lock", "metrics/summary.json", "data/check.ok", "data/methods.json",
               "data/check_data.ok", "models/sft.provenance.json")  # fmt: skip
    for name in (*written, "params.yaml", "tasks/ppo.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "--message", "a")
    for name in written:
        (tmp_path / name).write_text("2")
    (tmp_path / "metrics/summary.json").unlink()  # as DVC does before a stage
    assert git_state(tmp_path)[1] is False
    (tmp_path / "tasks/ppo.py").unlink()
    assert git_state(tmp_path)[1] is True
    git("checkout", "tasks")
    (tmp_path / "params.yaml").write_text("2")
    assert git_state(tmp_path)[1] is True


def test_without_git_a_stage_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    require_untracked(tmp_path, ["models/sft"])
    assert git(tmp_path, "status") is None


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.py")
    (tmp_path / name).write_text("a", encoding="utf-8")
    for words in ("init --quiet", "add .", "-c user.name=a -c user.email=a@b commit --quiet --message=1"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    (tmp_path / name).write_text("b", encoding="utf-8")
    assert (git(tmp_path, "diff", "--name-only", "-z") or "").startswith("caf")
