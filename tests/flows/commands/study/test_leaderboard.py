"""Rows of the leaderboard: gold within the budget of KL and tokens, of the demo only."""

from typing import Any

import pytest

from flows.commands.study import leaderboard
from flows.commands.study.trials import Trial
from rlhf_core.errors import UserError
from tests.conftest import table_rows

DEMO: dict[str, Any] = {"ingest": {"source": "demo", "demo": {}}, "judge": {},
                        "evaluate": {"max_prompts": 400, "seeds": [1, 2, 3]}}  # fmt: skip


def trial(seed: int, gold: float = 4.0, tokens: int = 500_000, **params: Any) -> Trial:
    """PPO at 1.4 nats with gold 2 and at 4.2 with `gold`, RLOO at 2 nats with gold 1.5; SFT has 0."""
    models = {"policy": {"tokens_trained": tokens}, "rloo": {"tokens_trained": 100}}
    points = [("sft", 0.0, 0.0), ("ppo", 1.4, 2.0), ("ppo", 4.2, gold), ("rloo", 2.0, 1.5)]
    frontier = [{"family": family, "kl": kl, "gold": score} for family, kl, score in points]
    return Trial(f"seed={seed}", (), (), params={**DEMO, "seed": seed, **params}, state="finished",
                 metrics={"evaluate": {"models": models}}, frontier=frontier)  # fmt: skip


def test_gold_is_that_of_the_budget_and_the_best_is_first() -> None:
    """PPO is half way between its snapshots at 2.8 nats; RLOO has spent less, and keeps what it has."""
    _heading, _line, *found = table_rows(
        leaderboard.rows([trial(1), trial(2), trial(3)], "0123456789abcdef", "leash study")
    )
    assert [(row[0], row[2].split()[0], row[3], row[4]) for row in found] == [
        ("PPO policy", "3.00", "3", "500,000"), ("RLOO", "1.50", "3", "100"),
    ]  # fmt: skip
    assert found[0][5:7] == ["0123456789ab", "`leash study`"]


def test_over_optimisation_does_not_lower_a_row() -> None:
    """With at most 2.8 nats one may stop at the peak."""
    _heading, _line, *found = table_rows(leaderboard.rows([trial(seed, gold=-5.0) for seed in (1, 2, 3)], "0", "x"))
    assert found[0][2].split()[0] == "2.00"


def test_a_method_over_the_budget_of_tokens_has_no_row() -> None:
    _heading, _line, *found = table_rows(
        leaderboard.rows([trial(seed, tokens=leaderboard.TOKENS + seed) for seed in (0, 1, 2)], "0", "x")
    )
    assert [row[0] for row in found] == ["RLOO"]


@pytest.mark.parametrize(
    ("trials", "says"),
    [
        ([trial(1), trial(2)], "a row needs 3 training seeds, not 2"),
        (
            [trial(1), trial(2), trial(3, ingest={"source": "files"})],
            "seed=3 differs from examples/demo.yaml in ingest",
        ),
        ([trial(1, ingest={"source": "demo", "demo": {"prompts": 9}})] * 3, "in ingest.source"),
        ([trial(1, judge={"kind": "function"})] * 3, "in judge"),
        ([trial(1, evaluate={"max_prompts": 400})] * 3, "in evaluate.seeds"),
        ([trial(1, evaluate={**DEMO["evaluate"], "temperature": 0.5})] * 3, "in evaluate.temperature"),
    ],
)
def test_rows_are_of_the_demo_with_three_seeds(trials: list[Trial], says: str) -> None:
    with pytest.raises(UserError, match=says):
        leaderboard.require_the_demo(trials)


def test_the_demo_with_three_seeds_is_taken_and_a_failed_trial_leaves_no_row() -> None:
    leaderboard.require_the_demo([trial(1), trial(2), trial(3)])
    with pytest.raises(UserError, match="has 2 finished trials, and a row needs 3 seeds"):
        leaderboard.rows([trial(1), trial(2)], "0", "x")
