"""`benchmarks/overoptimisation.py`: its tables, from runs that are made up."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import benchmark

STEPS = 30
HEALTHY = "mean, β = 0.1"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return benchmark("overoptimisation")


def run(script: ModuleType, arm: str, seed: int, kl: Sequence[float], **more: float) -> Any:
    """A run whose gold score is highest at step 15, with this KL (nats a token, ten tokens an answer) in each step."""
    rows = [
        {
            "step": float(step), "gold": 3.0 - 0.01 * (step - 15) ** 2, "kl": 10 * kl[step - 1],
            "reward_raw": float(step), "response_tokens_mean": 10.0, "repeated_ngram_share": 0.0, **more,
        }
        for step in range(1, STEPS + 1)
    ]  # fmt: skip
    return script.Run(arm, seed, rows)


def rising(to: float) -> list[float]:
    return [to * step / STEPS for step in range(STEPS)]


def rows_of(table: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name: cells for name, *cells in lines}


def test_each_arm_has_its_peak_and_its_end(script: ModuleType) -> None:
    """Means of five steps: the window of steps 13 to 17 lies 0.02 below the peak."""
    found = rows_of(script.ensembles([run(script, "min", seed, rising(0.3)) for seed in (1, 2)]))
    assert set(found) == {"reward", "---", "min"}
    peak, step, kl, end, _ = found["min"]
    assert peak.startswith("2.98 ")
    assert step == "15 (15 – 15) [15, 15]"
    assert kl.endswith("[1.40, 1.40]")
    assert end.endswith("[1.29, 1.29]")


def test_a_threshold_is_of_the_healthy_runs_of_other_seeds(script: ModuleType) -> None:
    """Healthy runs reach 0.09 and 0.18 nats a token (means of five steps): the first has the limit of the second, and
    is quiet; the second is a false alert. The other runs reach them before and after the peak, and never."""
    runs = [run(script, HEALTHY, 1, rising(0.1)), run(script, HEALTHY, 2, rising(0.2))]
    runs += [
        run(script, "mean", 1, rising(1.0)),
        run(script, "mean", 2, rising(0.2)),
        run(script, "min", 1, rising(0.1)),
    ]
    at = [found for _, found in script.alerts(script.SIGNALS["KL per token"], runs)]
    assert at[0] is None
    assert [found is not None for found in at] == [False, True, True, True, False]
    assert at[1] == at[3], "the same run, under another arm"
    assert rows_of(script.warnings(runs))["KL per token"] == ["1 of 2", "2 of 3", "4, 0, 8", "0.32"]


def test_runs_without_a_signal_are_not_counted(script: ModuleType) -> None:
    runs = [run(script, HEALTHY, seed, rising(0.1), **{"reward/std": 1.0}) for seed in (1, 2)]
    runs += [
        run(script, "one reward model", 1, rising(0.1)),
        run(script, "mean", 1, rising(0.1), **{"reward/std": 1.0}),
    ]
    table = rows_of(script.warnings(runs))
    assert table["standard deviation of the members, rise"] == ["0 of 2", "0 of 1", "–", "–"]
    assert table["correlation with the other reward model, fall"] == ["0 of 0", "0 of 0", "–", "–"]


def test_the_detector_is_measured_as_it_is(script: ModuleType) -> None:
    """Without a judge it waits for its limit of the KL, with the gold score for the fall."""
    made = run(script, "mean", 1, rising(1.0))
    assert [script.shipped(made, limit) for limit in (4.0, 5.0)] == [11, 14]
    with_judge = script.shipped(made, None)
    assert with_judge is not None
    assert with_judge > made.peak
