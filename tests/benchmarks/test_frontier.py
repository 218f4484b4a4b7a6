"""`benchmarks/frontier.py` on results that are made up: which runs it makes, and what it reads from them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Modules = Callable[[str], ModuleType]
WriteRun = Callable[[Path], None]
Sweep = Callable[..., Any]


class Runner:
    """Replaces `dvc repro`: records the parameters, and fails in one call if requested."""

    def __init__(self, write: WriteRun, fails_at: int = -1) -> None:
        self.write, self.fails_at = write, fails_at
        self.calls: list[dict[str, Any]] = []

    def __call__(self, clone: Path, params: Mapping[str, Any]) -> float:
        self.calls.append(json.loads(json.dumps(params)))
        if len(self.calls) - 1 == self.fails_at:
            raise InterruptedError
        self.write(clone)
        return 1.0


@pytest.fixture
def frontier(benchmark_module: Modules, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = benchmark_module("frontier")
    monkeypatch.setattr(module.clones, "clone", lambda folder: folder.mkdir(parents=True, exist_ok=True))
    return module


@pytest.fixture
def numbers(benchmark_module: Modules) -> ModuleType:
    return benchmark_module("frontier_points")


@pytest.fixture
def sweep(frontier: ModuleType, params: dict[str, Any], tmp_path: Path) -> Sweep:
    """One seed's sweep into `tmp_path`."""

    def run(runner: Runner | None, seed: int = 2, betas: Any = (0.1, 0.2), **changes: Any) -> Any:
        return frontier.run_seed(seed, betas, params | changes, tmp_path / "out", runner)

    return run


def test_the_first_beta_runs_all_and_the_others_leave_the_alternatives_out(
    sweep: Sweep, write_run: WriteRun, params: dict[str, Any], tmp_path: Path
) -> None:
    runner = Runner(write_run)
    assert list(sweep(runner)) == [(2, 0.1), (2, 0.2)]
    first, second = runner.calls
    assert first["seed"] == first["ingest"]["seed"] == second["seed"] == second["ingest"]["seed"] == 2
    assert (first["ppo"]["kl"]["coef"], second["ppo"]["kl"]["coef"]) == (0.1, 0.2)
    assert [first[name]["enabled"] for name in ("dpo", "rloo")] == [True, True]
    assert [second[name]["enabled"] for name in ("dpo", "rloo")] == [False, False]
    assert not (tmp_path / "out/clones/seed-2").exists()
    assert params["seed"] == 1


def test_an_interrupted_sweep_keeps_its_clone_and_repeats_no_finished_run(
    sweep: Sweep, write_run: WriteRun, tmp_path: Path
) -> None:
    with pytest.raises(InterruptedError):
        sweep(Runner(write_run, fails_at=1))
    assert (tmp_path / "out/clones/seed-2").exists()
    again = Runner(write_run)
    assert len(sweep(again)) == 2
    assert [call["ppo"]["kl"]["coef"] for call in again.calls] == [0.2]


def test_results_of_other_parameters_are_run_again(sweep: Sweep, write_run: WriteRun) -> None:
    sweep(Runner(write_run))
    other = Runner(write_run)
    sweep(other, betas=[0.1], dpo={"enabled": False})
    assert len(other.calls) == 1


def test_drawing_runs_nothing(sweep: Sweep, write_run: WriteRun, tmp_path: Path) -> None:
    assert sweep(None) == {}
    assert not (tmp_path / "out").exists()
    sweep(Runner(write_run), betas=[0.1])
    assert list(sweep(None)) == [(2, 0.1)]


def test_the_files_own_beta_comes_first(frontier: ModuleType) -> None:
    assert frontier.ordered([0.05, 0.1, 0.2, 0.05], 0.1) == [0.1, 0.05, 0.2]
    assert frontier.ordered([0.05, 0.2], 0.1) == [0.05, 0.2]


def test_gaps_are_positive_where_ppo_is_better(frontier: ModuleType, sweep: Sweep, write_run: WriteRun) -> None:
    runs = sweep(Runner(write_run), seed=1) | sweep(Runner(write_run), seed=2)
    lines = frontier.gap_table(runs).splitlines()
    assert lines[0] == "| β of PPO | PPO less, at its KL | seed 1 | seed 2 | mean |"
    assert lines[2] == "| 0.1 | best_of_2 | +0.375 | +0.375 | +0.375 |"
    assert lines[3] == "| 0.1 | best_of_4 | −0.500 | −0.500 | −0.500 |"
    assert lines[4] == "| 0.1 | dpo | – | – | – |"
    assert lines[5] == "| 0.2 | best_of_2 | +0.000 | +0.000 | +0.000 |"
    assert lines[6] == "| 0.2 | best_of_4 | −0.667 | −0.667 | −0.667 |", "straight in KL"


def test_another_betas_curve_begins_at_sft_too(numbers: ModuleType, sweep: Sweep, write_run: WriteRun) -> None:
    runs = sweep(Runner(write_run))
    assert numbers.gap(runs, 2, 0.2, "best_of_2") == 0.0, "the line from SFT is straight in KL"
    assert numbers.gap(runs, 2, 0.1, "best_of_2") == 0.375, "as metrics/evaluate.json has it"


def test_costs_grow_with_the_steps(numbers: ModuleType, sweep: Sweep, write_run: WriteRun) -> None:
    run = sweep(Runner(write_run))[2, 0.1]
    costs = [(cost.gold, cost.samples, cost.tokens) for cost in numbers.snapshot_costs(run)]
    assert costs == [(1.0, 0, 0.0), (2.0, 8, 150.0), (4.0, 16, 450.0)]
    assert numbers.model_costs(run) == {"dpo": numbers.Cost(3.0, 0, 300)}


def test_reward_model_scores_are_drawn_above_sfts(
    benchmark_module: Modules, numbers: ModuleType, sweep: Sweep, write_run: WriteRun
) -> None:
    """The reward models of two seeds have zeros of their own."""
    runs = sweep(Runner(write_run), seed=1) | sweep(Runner(write_run), seed=2)
    for row in runs[2, 0.1].tables["frontier"] + runs[2, 0.2].tables["frontier"]:
        row["reward"] = row["reward"] + 5 if isinstance(row["reward"], float) else row["reward"]
    assert numbers.sft_score(runs, 2, "reward") == numbers.sft_score(runs, 1, "reward") + 5
    gold, proxy = benchmark_module("frontier_pictures").frontier(runs).axes
    assert {line.get_ydata()[0] for line in proxy.lines if len(line.get_ydata()) > 2} == {0.0}
    assert {line.get_ydata()[0] for line in gold.lines if len(line.get_ydata()) > 2} == {1.0}


def test_three_pictures_are_drawn(benchmark_module: Modules, sweep: Sweep, write_run: WriteRun, tmp_path: Path) -> None:
    runs = sweep(Runner(write_run), seed=1) | sweep(Runner(write_run), seed=2)
    pictures = benchmark_module("frontier_pictures").draw(runs, tmp_path / "pictures")
    assert [path.name for path in pictures] == ["frontier.png", "equal-tokens.png", "equal-samples.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert len({path.read_bytes() for path in pictures}) == 3
