"""`leash runs`: what is listed, by which names, and what changed from run to run."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flows.commands.compare.sources import find
from flows.commands.runs import listed, render


def write(root: Path, gold: float, coef: float) -> None:
    (root / "metrics").mkdir(exist_ok=True)
    summary = {"gold_policy": gold, "win_rate": 0.8, "kl_per_sequence": 2.5}
    (root / "metrics/summary.json").write_text(json.dumps(summary), encoding="utf-8")
    text = json.dumps({**summary, "models": {"policy": {"gold": gold}}})
    (root / "metrics/evaluate.json").write_text(text, encoding="utf-8")
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    entry = {"params": {"params.yaml": {"seed": 1, "ppo": {"kl": {"coef": coef}}}},
             "outs": [{"path": "metrics/evaluate.json", "md5": digest}]}  # fmt: skip
    (root / "dvc.lock").write_text(json.dumps({"stages": {"evaluate": entry}}), encoding="utf-8")
    cached = root / ".dvc/cache/files/md5" / digest[:2] / digest[2:]
    cached.parent.mkdir(parents=True, exist_ok=True)
    cached.write_text(text, encoding="utf-8")
    (root / "params.yaml").write_text(f"seed: 1\nppo: {{kl: {{coef: {coef}}}}}\n", encoding="utf-8")


def git(root: Path, *words: str, date: str = "2026-01-01T00:00:00Z") -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    env = os.environ | {"GIT_COMMITTER_DATE": date}
    done = subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True, text=True, env=env)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits with results, an experiment, and a checkout that has run again since. The first commit has all
    figures in git, as those of older versions; the others have the summary."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text(".dvc\n", encoding="utf-8")
    for day, (gold, coef) in enumerate(((3.0, 0.05), (3.5, 0.2), (3.8, 0.3)), start=1):
        write(tmp_path, gold, coef)
        if day == 1:
            (tmp_path / "metrics/summary.json").unlink()
            shutil.rmtree(tmp_path / ".dvc")
        git(tmp_path, "add", ".")
        if day == 2:
            git(tmp_path, "rm", "--quiet", "--cached", "metrics/evaluate.json")
            (tmp_path / ".gitignore").write_text(".dvc\n/metrics/evaluate.json\n", encoding="utf-8")
            git(tmp_path, "add", ".gitignore")
        git(tmp_path, "commit", "--quiet", "-m", f"{gold}", date=f"2026-01-0{day}T00:00:00Z")
    git(tmp_path, "update-ref", f"refs/exps/aa/{'b' * 38}/coef=0.3", "HEAD")
    git(tmp_path, "reset", "--quiet", "--hard", "HEAD~")
    write(tmp_path, 4.0, 0.2)
    return tmp_path


def test_every_run_has_names_that_compare_accepts_and_its_changes(project: Path) -> None:
    rows = listed(project, 20)
    assert [row["gold"] for row in rows] == [4.0, 3.8, 3.5, 3.0]
    assert [row["names"] for row in rows[:2]] == [["."], ["coef=0.3"]]
    assert [row["changes"] for row in rows[1:]] == [
        {"ppo.kl.coef": ["0.2", "0.3"]}, {"ppo.kl.coef": ["0.05", "0.2"]}, None,
    ]  # fmt: skip
    for row in rows:
        assert find(project, row["names"][0]).evaluation["gold_policy"] == row["gold"]
    assert [row["gold"] for row in listed(project, 2)] == [4.0, 3.8]
    assert "ppo.kl.coef 0.05 → 0.2" in render(rows)


def test_equal_results_are_one_run_with_several_names(project: Path) -> None:
    write(project, 3.5, 0.2)
    first = listed(project, 20)[0]
    assert first["names"] == [".", git(project, "rev-parse", "--short", "HEAD")]
    assert (first["win_rate"], first["kl"]) == (0.8, 2.5)


def test_without_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert render(listed(tmp_path, 20)).startswith("no run yet")


def test_a_server_that_does_not_answer_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert len(listed(project, 20)) == 4
    errors = capsys.readouterr().err
    assert errors.startswith("left out: MLflow at http://127.0.0.1:9 (which does not answer")
    assert "secret" not in errors
