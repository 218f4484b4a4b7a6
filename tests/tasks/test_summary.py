"""The figures by which runs are compared."""

import json
from pathlib import Path

from ruamel.yaml import YAML

from tasks import summary

ROOT = Path(__file__).resolve().parents[2]


def test_the_summary_has_what_is_known_in_the_order_of_the_table() -> None:
    evaluation = {"win_rate_low": 0.7, "win_rate": 0.8, "gold_policy": None, "pairs_too_long": 0, "seeds": [1, 2]}
    alert = {"name": "repetition", "step": 3}
    found = summary.summarise(evaluation, {"heldout_accuracy": 0.9, "heldout_loss": 0.3}, {"alerts": [alert]})
    assert list(found.items()) == [("win_rate", 0.8), ("win_rate_low", 0.7), ("reward_accuracy", 0.9), ("alerts", 1)]
    assert summary.summarise({}, {"enabled": False}, {}) == {"alerts": 0}


def test_a_run_without_an_evaluation_has_no_figures(tmp_path: Path) -> None:
    assert summary.read(tmp_path) == {}
    (tmp_path / "metrics").mkdir()
    (tmp_path / summary.SUMMARY).write_text(json.dumps({"win_rate": 0.8}), encoding="utf-8")
    assert summary.read(tmp_path) == {"win_rate": 0.8}


def test_the_summary_is_the_only_metric_of_dvc_and_no_stage_has_a_plot() -> None:
    """`dvc metrics show` and `dvc exp show` have its figures only, `dvc plots show` the pictures of dvc.yaml only."""
    stages = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    assert [(name, stage["metrics"]) for name, stage in stages.items() if "metrics" in stage] == [
        ("evaluate", [{summary.SUMMARY: {"cache": False}}])
    ]
    assert not [name for name, stage in stages.items() if "plots" in stage]
