"""The tables and the picture of a study, from trials made by hand."""

import math
from typing import Any

import pytest

from flows.commands.study import picture, tables
from flows.commands.study.expressions import measure
from flows.commands.study.picture import mean_line
from flows.commands.study.trials import Call, Trial

CALL = Call((), objective="gold_policy", constraint="kl_per_sequence < 3")


def trial(coef: Any, seed: int, call: Call = CALL, **figures: float | None) -> Trial:
    setting = (("ppo.kl.coef", str(coef)),)
    made = Trial(f"coef={coef}-seed={seed}", setting, (), state="finished", metrics={"evaluate": figures}, seconds=1.0)
    measure(call, made)
    return made


TRIALS = [
    trial(0.1, 1, gold_policy=2.0, kl_per_sequence=4.0),
    trial(0.1, 2, gold_policy=2.2, kl_per_sequence=3.0),
    trial(0.2, 1, gold_policy=1.0, kl_per_sequence=3.5),
    trial(0.2, 2, gold_policy=1.4, kl_per_sequence=2.0),
]


def test_the_best_setting_with_and_without_the_constraint() -> None:
    free, bound = tables.verdicts(CALL, TRIALS)
    assert free.startswith("Highest gold_policy: coef 0.1, 2.100 (")
    assert bound.startswith("Highest gold_policy where kl_per_sequence < 3: coef 0.2, 1.200 (")


@pytest.mark.parametrize(
    ("objective", "figures", "says"),
    [
        ("gold_policy", {"gold_policy": None, "kl_per_sequence": 1.0}, "is not a number in these metrics (it is None)"),
        ("gold_polcy", {"gold_policy": 1.0, "kl_per_sequence": 1.0}, "gold_polcy"),
        ("gold_policy", {"gold_policy": 1.0}, "kl_per_sequence"),
    ],
)
def test_a_trial_without_a_value_is_named_and_the_tables_are_made(
    objective: str, figures: dict[str, Any], says: str
) -> None:
    call = Call((), objective=objective, constraint="kl_per_sequence < 3")
    trials = [*TRIALS, trial(0.3, 1, call, **figures)]
    last = tables.verdicts(call, trials)[-1]
    assert last.startswith("Without a value: ")
    assert says in last
    assert "0.3" in tables.report(call, trials)


@pytest.mark.parametrize("aim", ["win_rate", "gold_policy"])
def test_an_objective_that_is_a_column_is_shown_once(aim: str) -> None:
    call = Call((), objective=aim)
    table = tables.report(call, [trial(0.1, 1, call, gold_policy=2.0, win_rate=0.75)]).split("### Settings")[1]
    assert "| win rate |" in table
    assert aim not in table


def test_the_mean_of_two_parts_of_one_line_is_that_line() -> None:
    """Seeds reach different KL; their mean is over heights at equal KL."""
    places, heights = mean_line([[(0, 0), (1, 1), (2, 2)], [(0, 0), (1.5, 1.5), (3, 3)]])
    assert (places, heights) == ([0, 1, 2], pytest.approx([0, 1, 2]))


def test_the_picture_has_a_line_for_each_setting_with_snapshots() -> None:
    trials = [trial(coef, seed) for coef in (0.1, 0.2) for seed in (1, 2)]
    assert picture.draw(tables.by_setting(trials)) is None
    for one in trials:
        rows = [("sft", 0.0, 0.0, 1.0), ("ppo", 10.0, 1.0, 2.0), ("ppo", 20.0, 4.0, 3.0), ("dpo", None, 2.0, 2.0)]
        one.frontier = [dict(zip(("family", "point", "kl", "gold"), row, strict=True)) for row in rows]
    drawn = picture.draw(tables.by_setting(trials))
    assert drawn is not None
    assert drawn.startswith(b"\x89PNG")
    assert drawn != picture.draw(tables.by_setting(trials[:2]))


def test_the_reward_has_a_panel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each panel draws its own column: here the reward is twice the gold score, of PPO as of the alternatives."""
    monkeypatch.setattr(picture, "png", lambda figure: figure)
    one = trial(0.1, 1)
    rows = [("sft", 0.0, 0.0, 1.0), ("ppo", 10.0, 1.0, 2.0), ("ppo", 20.0, 4.0, 3.0), ("dpo", None, 2.0, 2.0)]
    one.frontier = [dict(zip(("family", "point", "kl", "gold"), row, strict=True)) for row in rows]
    alone: Any = picture.draw(tables.by_setting([one]))
    assert len(alone.axes) == 1
    one.frontier = [row | {"reward": 2 * row["gold"]} for row in one.frontier]
    drawn: Any = picture.draw(tables.by_setting([one]))
    gold, reward = ([list(line.get_ydata()) for line in axes.get_lines()] for axes in drawn.axes)
    assert len(gold) == 2
    for own, other in zip(gold, reward, strict=True):
        assert other == pytest.approx([2 * height for height in own])


def test_without_gold_the_picture_has_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function's reward, as in examples/arithmetic.yaml."""
    monkeypatch.setattr(picture, "png", lambda figure: figure)
    one = trial(0.1, 1)
    rows = [("sft", 0.0, 0.0, 0.4), ("ppo", 80.0, 1.0, 0.9), ("rejection_sft", None, 0.8, 0.95)]
    one.frontier = [
        dict(zip(("family", "point", "kl", "reward"), row, strict=True)) | {"gold": math.nan} for row in rows
    ]
    drawn: Any = picture.draw(tables.by_setting([one]))
    (axes,) = drawn.axes
    assert axes.get_ylabel() == "reward"
    assert [list(line.get_ydata())[-1] for line in axes.get_lines()] == pytest.approx([0.9, 0.95])
    assert f"| {one.name} | finished | – | – | – |  |" in tables.report(Call(()), [one]), "no step of the highest gold"


def test_methods_are_compared_by_gold_reward_kl_and_length() -> None:
    """A method that has no such figure has no row, and a figure that no method has makes no table."""
    one = Trial("seed=1", (), (), state="finished", seconds=1.0)
    one.metrics = {"evaluate": {"models": {"sft": {"gold": 0.5, "reward": 1.0}, "policy": {"gold": 1.5, "kl": 2.0}}}}
    text = tables.report(Call(()), [one])
    assert "### Compared methods: gold\n\n| gold | as committed |\n| --- | --- |\n| SFT | 0.500 |\n| PPO policy" in text
    assert "### Compared methods: reward\n\n| reward | as committed |\n| --- | --- |\n| SFT | 1.000 |\n\n" in text
    assert (
        "### Compared methods: KL, nats\n\n| KL, nats | as committed |\n| --- | --- |\n| PPO policy | 2.000 |" in text
    )
    assert "tokens per answer" not in text
