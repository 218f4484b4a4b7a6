"""`leash doctor`: each finding says what to do, and only what is broken makes it fail."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.doctor import Check, examine, render
from tests.conftest import call
from tests.tasks.tracking.conftest import pipeline, stage


@pytest.fixture
def checks(toy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Check]]:
    root = toy({"one": ("work", [])})
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    (root / "params.yaml").write_text("threads: 999\nppoo: {}\n")
    return lambda: {check.name: check for check in examine(root)}


def test_findings(checks: Callable[[], dict[str, Check]]) -> None:
    found = checks()
    assert found["threads"].verdict == "note"
    assert found["git"].verdict == "note"
    assert (found["dvc"].verdict, found["dvc"].found) == ("ok", "1 stages: one")
    assert found["params.yaml"].verdict == "BROKEN"
    assert "ppoo" in found["params.yaml"].found
    assert found["prefect"].verdict == "BROKEN"
    assert found["mlflow"].verdict == "note", "runs go on without MLflow"
    assert all(check.advice for check in found.values() if check.verdict != "ok")


def test_the_stages_are_a_list_and_results_are_no_changed_files(toy: Callable[..., Path]) -> None:
    root = toy({"one": ("work", []), "two": ("work", [])})
    call(root, "git", "add", ".")
    call(root, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "all")
    for name in ("dvc.lock", "metrics/summary.json", "data/check.ok", "models/m.provenance.json"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("schema: '2.0'\n")
    found = {check.name: check for check in examine(root)}
    assert found["dvc"].found == "2 stages: one, two"
    assert (found["git"].verdict, found["git"].found) == ("ok", "clean, apart from results of runs")
    (root / "worker.py").write_text("edited\n")
    [git] = [check for check in examine(root) if check.name == "git"]
    assert git.found == "changed files: 1, results of runs not counted"


def test_a_check_that_fails_is_a_finding(
    checks: Callable[[], dict[str, Check]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: 1 / 0)
    assert checks()["disk"].verdict == "BROKEN"


def test_a_list_of_files_in_use_is_removed_only_where_dvc_is_dead(toy: Callable[..., Path]) -> None:
    root = toy({"one": ("work", [])})

    def found(command: str) -> Check:
        entry = {"pid": os.getpid(), "cmd": command}
        (root / ".dvc/tmp").mkdir(exist_ok=True)
        (root / ".dvc/tmp/rwlock").write_text(json.dumps({"write": {"one.out": entry}, "read": {"a": [entry]}}))
        [check] = [check for check in examine(root) if check.name == "locks"]
        return check

    own = " ".join(psutil.Process().cmdline()[1:])
    assert found(own) == Check("locks", "note", f"DVC runs here (process {os.getpid()})")
    assert found("/bin/dvc repro").found == f".dvc/tmp/rwlock names dead processes: {os.getpid()}"
    assert found("/bin/dvc repro").advice == "rm .dvc/tmp/rwlock if DVC says that a file is busy"


def test_what_mlflow_has_not_received_is_a_finding(toy: Callable[..., Path]) -> None:
    root = toy({"one": ("work", [])})
    assert not [check for check in examine(root) if check.advice == "leash run --sync"]
    stage(root, pipeline(root), "one", points=2)
    [check] = [check for check in examine(root) if check.advice == "leash run --sync"]
    assert (check.name, check.found) == ("mlflow", "runs that are not all there: 1")


def test_the_end_is_where_the_results_are(toy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = toy({"one": ("work", [])})
    (root / "report").mkdir()
    (root / "report/index.html").touch()
    monkeypatch.chdir(root)
    end = CliRunner().invoke(app, ["doctor"]).stdout.split("\n\n")[-1].splitlines()
    assert f"report  {root / 'report/index.html'}" in end
    assert end[-1] == "MLflow  `leash ui` shows its page"


def test_the_table_has_a_line_a_check_and_the_advice_after_it() -> None:
    text = render([Check("one", "ok", "good"), Check("two", "BROKEN", "bad", "fix it")])
    assert text.splitlines() == [
        "check          found",
        "one    ok      good",
        "two    BROKEN  bad",
        "",
        "two: fix it",
    ]
