"""`benchmarks/seeds.py`: its tables, on results that are made up."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Modules = Callable[[str], ModuleType]
Params = dict[str, Any]


@pytest.fixture
def seeds(benchmark_module: Modules) -> ModuleType:
    return benchmark_module("seeds")


@pytest.fixture
def result(seeds: ModuleType, write_run: Callable[[Path], None], params: Params, tmp_path: Path) -> Any:
    write_run(tmp_path)
    found = seeds.clones.result(tmp_path, params, 61.4)
    found.metrics["reward"] = {"heldout_accuracy": 0.84, "heldout_accuracy_ci95": [0.82, 0.86]}
    found.metrics["ppo"] = {"alerts": [{"name": "reward_hacking", "step": 31}]}
    return found


def rows(table: str) -> dict[str, list[str]]:
    """Cells of each row by its first one."""
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "---" not in line)
    return {first: rest for first, *rest in cells}


def test_a_row_a_seed_with_its_seconds(seeds: ModuleType, result: Any) -> None:
    table = rows(seeds.seed_table({1: result, 3: result}))
    found = dict(zip(table["seed"], table["3"], strict=True))
    assert found["reward model accuracy"] == "0.840"
    assert found["95% interval"] == "0.700 to 0.900"
    assert found["alerts"] == "reward_hacking (31)"
    assert found["seconds"] == "61"
    assert list(table) == ["seed", "1", "3"]


def test_the_gold_score_of_each_model_and_its_mean(seeds: ModuleType, result: Any) -> None:
    table = rows(seeds.model_table({1: result, 2: result}))
    assert table["best_of_4"] == ["3.500", "3.500", "3.500"]
    assert list(table) == ["gold score", "sft", "policy", "best_of_4", "dpo"]


def test_a_lead_is_positive_where_ppo_is_better(seeds: ModuleType, result: Any) -> None:
    table = rows(seeds.verdict_table({1: result}))
    assert table["policy − best_of_4, gold"] == ["+0.500 (+0.250 to +0.750)", "+0.500"]
    assert table["PPO − best_of_4, gold, at its KL"] == ["−0.500 (−0.750 to −0.250)", "−0.500"]
    assert "policy − rejection_sft, gold" not in table


def test_the_fall_is_from_the_best_snapshot_to_the_last(seeds: ModuleType, result: Any) -> None:
    assert rows(seeds.fall_table({1: result}))["1"][-4:] == ["+0.000", "–", "31", "–"]
    result.tables["frontier"][2]["gold"] = 0.25
    result.metrics["select"] = {"step": 1}
    result.metrics["evaluate"]["stopping"] = {"difference": 1.5, "difference_ci95": [1.25, 1.75]}
    row = rows(seeds.fall_table({1: result}))["1"]
    scores = ["2.000", "0.250", "1.500", "2.500", "1.000", "4.000"]
    assert row == ["1", "2", *scores, "+1.750", "+1.500 (+1.250 to +1.750)", "31", "1"]
    result.metrics["ppo"]["alerts"] = []
    assert rows(seeds.fall_table({1: result}))["1"][-2] == "none"
    assert seeds.fall_table({1: seeds.Result({}, {}, 1.0, {})}) == ""


def test_a_seed_without_a_baseline_has_a_dash_and_leaves_no_mean(
    seeds: ModuleType, result: Any, params: Params
) -> None:
    alone = seeds.Result({"evaluate": {"models": {}}}, {}, 1.0, params)
    table = rows(seeds.verdict_table({1: result, 2: alone}))
    assert table["policy − best_of_4, gold"] == ["+0.500 (+0.250 to +0.750)", "–", "–"]
    assert seeds.verdict_table({2: alone}) == seeds.model_table({2: alone}) == ""


def test_what_is_kept_of_a_run_comes_back(
    seeds: ModuleType, write_run: Callable[[Path], None], params: Params, tmp_path: Path
) -> None:
    write_run(tmp_path / "clone")
    seeds.clones.keep(tmp_path / "clone", params, 2.5, tmp_path / "kept" / "seed-1")
    back = seeds.clones.kept_run(tmp_path / "kept" / "seed-1", params)
    assert back == seeds.clones.result(tmp_path / "clone", params, 2.5)
    assert seeds.clones.kept_run(tmp_path / "kept" / "seed-1", params | {"seed": 4}) is None
    assert seeds.clones.kept_run(tmp_path / "kept" / "seed-2", params) is None


def test_the_users_parameters_are_copied_and_changed(seeds: ModuleType, params: Params) -> None:
    changed = seeds.clones.with_seed(params, 7, {"ppo.kl.coef": 0.5})
    assert (changed["seed"], changed["ingest"]["seed"], changed["ppo"]["kl"]["coef"]) == (7, 7, 0.5)
    assert params["ppo"]["kl"]["coef"] == 0.1
    with pytest.raises(KeyError):
        seeds.clones.with_seed(params, 7, {"hybrid.enabled": False})


def test_a_missing_parameter_file_is_named(seeds: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"gone\.yaml.*--params"):
        seeds.clones.read_params(tmp_path / "gone.yaml")
