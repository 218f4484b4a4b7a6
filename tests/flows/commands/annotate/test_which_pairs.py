"""`benchmarks/which_pairs.py`: simulated annotators label through the real server, and the table is of their labels."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.demo.rubric import gold_score
from rlhf_core.errors import UserError
from rlhf_core.models.hf import save_checkpoint
from rlhf_core.reward import Comparison
from tests.conftest import ROOT, benchmark, clean_environment
from tests.flows.commands.annotate.conftest import write_rows
from tests.rlhf_core.conftest import tiny_lm, tiny_tokenizer

SCRIPT = ROOT / "benchmarks" / "which_pairs.py"
ANSWERS = ("boiled eggs", "oatmeal with nuts", "rest", "it depends")
"""The first two are a tie."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return benchmark("which_pairs")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A project with an SFT model, its answers to 12 prompts, and annotators without noise."""
    root = tmp_path / "project"
    save_checkpoint(root / "models/sft", tiny_lm(), tiny_tokenizer())
    (root / "data/preferences").mkdir(parents=True)
    rows = [
        {"prompt": [{"role": "user", "content": f"breakfast {i}"}], "response": text, "ended": True, "split": split}
        for i, split in enumerate(["train"] * 8 + ["validation"] * 4)
        for text in ANSWERS
    ]
    write_rows(root / "data/preferences/samples.jsonl", rows)
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    params = (ROOT / "params.yaml").read_text(encoding="utf-8")
    source = "  source: judge                # judge | model | dataset | both\n"
    quiet = params.replace(source, f"{source}  annotators: {{temperature: 0.0, flip_rate: 0.0}}\n")
    assert quiet != params
    (root / "params.yaml").write_text(quiet, encoding="utf-8")
    return root


def exported(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}-labels.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.slow
def test_all_labels_come_from_sessions_and_none_is_asked_twice(run: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--seeds", "2", "--labels", "6,10", "--folder", "study"]
    done = subprocess.run(words, cwd=run, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads((run / "study/which_pairs.json").read_text(encoding="utf-8"))
    for choice in ("random", "margin", "disagreement"):
        rounds = [exported(run / "study", name) for name in ("random-2-6", f"{choice}-2-10")]
        rows = [row for labels in rounds for row in labels]
        assert [len(labels) for labels in rounds] == [6, 4]
        assert len({row["task"] for row in rows}) == 10
        assert {tuple(row["order"]) for row in rows} == {(1, 2), (2, 1)}, "the order shown is random"
        for row in rows:
            question = row["prompt"][0]["content"]
            assert int(question.split()[1]) < 8, "held-out prompts are not asked for"
            better, worse = (gold_score(question, row[side]) for side in ("chosen", "rejected"))
            assert better > worse or (row["tie"] and better == worse)
        points = [point for point in content["points"] if point["choice"] == choice]
        assert [point["labels"] for point in points] == [6, 10]
        assert points[-1]["ties"] == sum(row["tie"] for row in rows)
        assert points[-1]["wrong"] == 0
    assert len({point["right"] for point in content["points"] if point["labels"] == 6}) == 1, "the same first model"
    assert done.stdout.count("\n| 10 | ") == 3


def test_wrong_calls_are_refused_before_anything_is_written(script: ModuleType, run: Path) -> None:
    folder = run / "study"
    with pytest.raises(UserError, match=r"--labels 49: the training prompts have 48 pairs"):
        script.prepare(run, folder / "large", [10, 49])
    (folder / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match="not empty"):
        script.prepare(run, folder, [10])
    assert [path.name for path in folder.iterdir()] == ["mine"]
    (run / "models/sft/config.json").unlink()
    with pytest.raises(UserError, match="leash run preferences"):
        script.prepare(run, run / "new", [10])
    assert not (run / "new").exists()


def test_held_out_pairs_are_those_of_validation_prompts_without_ties(script: ModuleType, run: Path) -> None:
    study = script.prepare(run, run / "study", [10])
    assert [len(comparison.pairs) for comparison in study.heldout] == [5] * 4, "one of six pairs is a tie"
    assert {task.prompt[0]["content"] for task in study.pool} == {f"breakfast {i}" for i in range(8)}


def test_differences_are_paired_and_the_table_has_a_row_for_each_choice(script: ModuleType) -> None:
    """Seeds differ by 0.2, and margin is 0.1 better with each of them: only the paired interval excludes 0."""
    study = SimpleNamespace(heldout=[Comparison([1], [[2], [3]], [(0, 1)] * 2)] * 50)
    pairs, points = np.arange(100), []
    for seed, share in enumerate((50, 70, 90)):
        base = script.Point("random", seed, 100, 3, 1, 60, (pairs < share).astype(float))
        better = (pairs < share + 10).astype(float)
        points += [base, replace(base, choice="margin", right=better), replace(base, choice="disagreement")]
    random, margin, disagreement = script.summaries(study, points)
    assert random["less_random"] is disagreement["less_random"] is None
    assert margin["accuracy"][0] == pytest.approx(0.8)
    assert margin["accuracy"][1] < random["accuracy"][0]
    mean, low, high = margin["less_random"]
    assert mean == pytest.approx(0.1)
    assert 0.0 < low < 0.1 < high
    lines = script.table([random, margin, disagreement]).splitlines()
    assert len(lines) == 5
    assert lines[2].startswith("| 100 | random | 0.700 (")
    assert lines[2].endswith(") | – | 3 | 1 | 60 |")
    assert "| +0.100 (0.0" in lines[3]
