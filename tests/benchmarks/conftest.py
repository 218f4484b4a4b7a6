"""What tests of `benchmarks/` share: its modules, importable as its scripts import each other, and runs with results
that are made up."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

FRONTIER = """\
family,point,kl,sqrt_kl,gold,gold_low,gold_high,reward,reward_low,reward_high,win_rate
sft,0,0.0,0.0,1.0,,,0.5,,,
ppo,1,1.0,1.0,2.0,,,1.5,,,
ppo,2,4.0,2.0,4.0,,,2.5,,,
best_of_n,1,0.0,0.0,1.0,,,0.5,,,
best_of_n,2,0.25,0.5,1.25,,,1.0,,,
best_of_n,4,2.25,1.5,3.5,,,1.6,,,
dpo,0,9.0,3.0,3.0,,,2.0,,,
"""
CURVE = "step,response_tokens_mean,tokens_trained\n1,10,150\n2,20,300\n"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of `benchmarks/` by name, as `python benchmarks/NAME.py` finds it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


@pytest.fixture
def params() -> dict[str, Any]:
    """What the benchmarks read of a parameter file."""
    return {
        "seed": 1,
        "ingest": {"seed": 1},
        "ppo": {"kl": {"coef": 0.1}, "batch_size": 8, "ppo_epochs": 2},
        "dpo": {"enabled": True},
        "rloo": {"enabled": True},
    }


@pytest.fixture
def write_run() -> Callable[[Path], None]:
    """Makes up what a run leaves: metrics and tables."""

    def write(folder: Path) -> None:
        for name in ("metrics", "plots"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "plots/frontier.csv").write_text(FRONTIER, encoding="utf-8")
        (folder / "plots/ppo.csv").write_text(CURVE, encoding="utf-8")
        (folder / "metrics/evaluate.json").write_text(EVALUATION, encoding="utf-8")

    return write


EVALUATION = """\
{"gold_sft": 1.0, "gold_policy": 4.0, "win_rate": 0.8, "win_rate_ci95": [0.7, 0.9], "kl_per_sequence": 4.0,
 "kl_exact_per_sequence": 4.0, "optimum": [{"kl": 1.0, "reward": 3.0, "gold": 4.0},
                                           {"kl": 4.0, "reward": 4.0, "gold": 5.0}],
 "missing_eos_share": 0.0, "prompts": 40,
 "models": {
   "sft": {"gold": 1.0, "gold_minus_policy": -3.0, "gold_minus_policy_ci95": [-3.5, -2.5],
           "samples_generated": null, "tokens_trained": null},
   "policy": {"gold": 4.0, "gold_minus_policy": 0.0, "gold_minus_policy_ci95": [0.0, 0.0],
              "samples_generated": 16, "tokens_trained": 480},
   "best_of_4": {"gold": 3.5, "gold_minus_policy": -0.5, "gold_minus_policy_ci95": [-0.75, -0.25],
                 "samples_generated": 160, "tokens_trained": 0},
   "dpo": {"gold": 3.0, "gold_minus_policy": -1.0, "gold_minus_policy_ci95": [-1.5, -0.5],
           "samples_generated": 0, "tokens_trained": 300}},
 "fits": {"ppo_gold": {"start": 1.5, "alpha": 0.5, "beta": -0.1, "r2": 1.0, "points": 4}, "ppo_reward": null},
 "frontier": {"best_of_2": {"kl": 0.25, "gold": 1.25, "gold_gap": 0.375, "gold_gap_ci95": [0.25, 0.5]},
              "best_of_4": {"kl": 2.25, "gold": 3.5, "gold_gap": -0.5,
                            "gold_gap_ci95": [-0.75, -0.25]}, "dpo": null}}
"""
