"""Three rounds of the tiny run: each goes on from the last, and a clone of its commit has its results."""

import csv
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import Project, Reproduce, clean_environment
from tests.faults.conftest import until

if TYPE_CHECKING:
    from tasks.datasets.jsonl import Row

SOMEBODY = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
GATES = {"check", "check_data"}
"""Stages that run in every clone."""


def git(project: Project, *words: str) -> str:
    done = project.run("git", *SOMEBODY, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(project: Project, message: str) -> str:
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", message)
    return git(project, "rev-parse", "HEAD")


def leash(project: Project, *words: str) -> str:
    done = project.run(sys.executable, "-m", "flows.cli", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pairs_by_round(project: Project) -> Counter[int | None]:
    rows: list[Row] = project.rows("data/preferences/preferences.jsonl")
    return Counter(row.get("round") for row in rows)


def first_kl(project: Project) -> float:
    """The KL of PPO's first answers to the reference, nats."""
    with (project.root / "plots/ppo.csv").open(encoding="utf-8", newline="") as file:
        return float(next(csv.DictReader(file))["kl"])


def killed_in_the_middle(project: Project) -> None:
    """Start `leash round`, and kill it as soon as it has begun to write."""
    folder = project.root / "rounds"
    before = set(folder.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "round"], cwd=project.root, env=clean_environment(), start_new_session=True
    )
    until(lambda: set(folder.iterdir()) != before)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_rounds_go_on_from_each_other_and_a_clone_has_them(
    finished: Project, reproduce: Reproduce, tmp_path: Path
) -> None:
    for name in ("best_of_n", "rejection_sft", "dpo", "rloo"):
        finished.set(f"{name}.enabled", False)
    finished.evaluate_little()
    finished.set("runtime.tracking", False)
    reproduce(finished)
    first = pairs_by_round(finished)
    assert first.keys() == {None}
    commit(finished, "round 1")

    killed_in_the_middle(finished)
    assert "round 1 is closed" in leash(finished, "round")
    assert git(finished, "status", "--porcelain") == "A  rounds/1.dvc"
    commit(finished, "Close round 1")

    ran = reproduce(finished)
    assert not {"ingest", "base", "sft"} & set(ran), "what comes before the policy is not made again"
    assert {"preferences", "reward", "ppo", "select", "evaluate", "report"} <= set(ran)
    second = pairs_by_round(finished)
    assert second[1] == first[None]
    assert second.keys() == {1, 2}
    assert first_kl(finished) > 1e-4, "the reference is the SFT model, and PPO begins elsewhere"
    assert list(finished.json("metrics/evaluate.json")["models"]) == ["sft", "policy", "round_1"]
    assert "Round 1&#39;s policy" in (finished.root / "report/index.html").read_text(encoding="utf-8")
    of_second = commit(finished, "round 2")
    policy = finished.outputs()["models/policy/model.safetensors"]
    leash(finished, "round")
    commit(finished, "Close round 2")

    finished.set("round", {"reference": "previous"})
    reproduce(finished, "ppo")
    assert pairs_by_round(finished).keys() == {1, 2, 3}
    assert first_kl(finished) < 1e-6, "PPO begins with its reference"
    commit(finished, "round 3")

    clone = Project(tmp_path / "clone")
    git(finished, "clone", "--quiet", str(finished.root), str(clone.root))
    git(clone, "checkout", "--quiet", of_second)
    clone.dvc("config", "--local", "cache.dir", str(finished.root / ".dvc/cache"))
    clone.dvc("checkout", "rounds/1.dvc")
    assert set(reproduce(clone)) <= GATES, "all else comes from DVC's cache"
    assert clone.outputs()["models/policy/model.safetensors"] == policy
    assert leash(clone, "round", "--list").splitlines()[-1].startswith("the present round is 2")
