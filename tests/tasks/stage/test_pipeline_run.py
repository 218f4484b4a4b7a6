"""The identity of a pipeline run, and what is recorded of stages that DVC restored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tasks.params.loader import read_yaml
from tasks.stage.dvc_files import digest
from tasks.stage.pipeline_run import collect, identity, run_url
from tasks.tracking import record, settings
from tests.conftest import call

GRAPH = "stages: {one: {cmd: python one.py}, two: {cmd: python two.py}}\n"
PARAMS: dict[str, Any] = {"seed": 1, "runtime": {"tracking": True}, "one": {"a": {"b": 1}}}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("USER", raising=False)
    files = {
        "dvc.yaml": GRAPH,
        "code.py": "",
        "data/raw/README.md": "",
        "data/raw/set.dvc": "outs: [{md5: a, path: set}]\n",
    }
    for name, text in (files | {"params.yaml": "seed: 1\none: {a: {b: 1}}\n", ".gitignore": "work\n"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    call(tmp_path, "git", "init", "--quiet", "--initial-branch", "trunk")
    call(tmp_path, "git", "add", "--all")
    call(tmp_path, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "a commit")
    return tmp_path


def change(**blocks: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda root: PARAMS | blocks


def rewrite(name: str, text: str) -> Callable[[Path], dict[str, Any]]:
    def apply(root: Path) -> dict[str, Any]:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
        return PARAMS

    return apply


@pytest.mark.parametrize(
    ("edit", "another_run"),
    [
        (change(runtime={"tracking": False}), False),
        (rewrite("code.py", "pass\n"), False),
        (rewrite("data/raw/README.md", "a remark\n"), False),
        (change(one={"a": {"b": 2}}), True),
        (change(seed=2), True),
        (rewrite("data/raw/set.dvc", "outs: [{md5: b}]\n"), True),
        (rewrite("data/raw/more.jsonl", "{}\n"), True),
        (rewrite("rounds/1.dvc", "outs: [{md5: c}]\n"), True),
        (rewrite("dvc.yaml", GRAPH.replace("python two.py", "python -O two.py")), True),
    ],
)
def test_the_identity_of_a_pipeline_run(root: Path, edit: Callable[[Path], dict[str, Any]], another_run: bool) -> None:
    before = identity(root, PARAMS)["key"]
    assert (identity(root, edit(root))["key"] != before) is another_run


def test_commit_branch_and_origin_are_tags_without_a_password(root: Path) -> None:
    call(root, "git", "remote", "add", "origin", "https://user:hunter2@example.org/team/project.git")
    tags = identity(root, PARAMS)["tags"]
    assert len(tags["mlflow.source.git.commit"]) == 40
    assert tags["mlflow.source.git.branch"] == "trunk"
    assert tags["mlflow.source.git.repoURL"] == "https://example.org/team/project.git"


def test_what_differs_from_the_commit(root: Path) -> None:
    (root / "code.py").write_text("pass\n", encoding="utf-8")
    run = identity(root, PARAMS)
    assert run["edited"] == ["code.py"]
    assert run["tags"]["leash.dirty"] == "true"


def lock(root: Path, stages: dict[str, dict[str, Any]]) -> None:
    """dvc.yaml and dvc.lock with these stages: parameters, and outputs that are written."""
    content: dict[str, Any] = {"schema": "2.0", "stages": {}}
    graph: dict[str, Any] = {"stages": {}}
    for name, entry in stages.items():
        outs = []
        for path, text in entry["outs"].items():
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
            outs.append({"path": path, "md5": hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()})
        deps = [{"path": "data/ingest/a.jsonl", "md5": "d"}, {"path": "tasks/one.py", "md5": "c"}]
        content["stages"][name] = {
            "cmd": f"python {name}.py", "deps": deps, "params": {"params.yaml": entry["params"]}, "outs": outs,
        }  # fmt: skip
        graph["stages"][name] = {
            "cmd": f"python {name}.py", "deps": [dep["path"] for dep in deps], "params": list(entry["params"]),
            "metrics": [{path: {"cache": False}} for path in entry["outs"]],
        }  # fmt: skip
    YAML().dump(content, root / "dvc.lock")
    YAML().dump(graph, root / "dvc.yaml")


def test_stages_that_dvc_restored_are_recorded_once_with_their_hashes(root: Path) -> None:
    lock(root, {
        "check": {"params": {}, "outs": {"data/check.ok": ""}},
        "one": {"params": {"one.a.b": 1}, "outs": {"metrics/one.json": "{}"}},
        "two": {"params": {"one.a.b": 2}, "outs": {"metrics/two.json": "{}"}},
        "dpo": {"params": {}, "outs": {"metrics/dpo.json": "{}"}},
    })  # fmt: skip
    assert collect(root) is None, "a part of a pipeline alone is no run"
    record.open_record(root, identity(root, read_yaml(root / "params.yaml")))
    for _ in range(2):
        folder = collect(root)
        assert folder is not None
        (one,) = record.executions(folder)
    assert one["stage"] == "one", "two has other parameters, dpo is switched off"
    assert one["restored"]
    assert one["inputs"] == {"data/ingest/a.jsonl": "d"}
    deps = {"data/ingest/a.jsonl": "d", "tasks/one.py": "c"}
    assert one["key"] == digest({"cmd": "python one.py", "params": {"one.a.b": 1}, "deps": deps})
    assert json.loads((one["folder"] / record.FILES / "metrics/one.json").read_text()) == {}


def test_outputs_that_are_not_those_of_the_lock_are_not_recorded(root: Path) -> None:
    lock(root, {"one": {"params": {}, "outs": {"metrics/one.json": "{}"}}})
    (root / "metrics/one.json").write_text('{"a": 1}', encoding="utf-8")
    assert collect(root) is None
    (root / "metrics/one.json").write_text("{}", encoding="utf-8")
    (root / "params.yaml").write_text("runtime: {tracking: false}\n", encoding="utf-8")
    assert collect(root) is None


def test_an_isolated_run_has_the_name_of_its_experiment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.RUN_VARIABLE, "betas-1")
    monkeypatch.setenv(settings.STUDY_VARIABLE, "betas")
    run = identity(root, PARAMS)
    assert (run["experiment"], run["study"], run["tags"]["leash.experiment"]) == ("betas-1", "betas", "betas-1")


def test_the_page_of_the_run_of_the_present_parameters(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert run_url(root) is None, "MLflow does not have it"
    folder = record.open_record(root, identity(root, read_yaml(root / "params.yaml")))
    page = "http://127.0.0.1:5000/#/experiments/1/runs/a"
    record.confirm(folder, settings.uri_mark("http://127.0.0.1:5000"), record.changed_ns(folder), page)
    assert run_url(root) == page
    (root / "params.yaml").write_text("seed: 2\n", encoding="utf-8")
    assert run_url(root) is None
