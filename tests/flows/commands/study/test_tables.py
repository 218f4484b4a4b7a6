"""The tables and pictures of a study, from trials made by hand."""

from typing import Any

import pytest

from flows.commands.study import grid, page, tables
from flows.commands.study.pictures import mean_line
from flows.commands.study.results import StudyInfo, Trial


def trial(coef: Any, seed: int, **figures: float | None) -> Trial:
    setting = (("ppo.kl.coef", coef),)
    return Trial(f"coef={coef}-seed={seed}", setting, seed, "finished", {"evaluate": figures}, {}, {}, 1.0)


INFO = StudyInfo("s", "c0ffee", "leash study", objective="gold_policy", constraint="kl_per_sequence < 3")
TRIALS = [
    trial(0.1, 1, gold_policy=2.0, kl_per_sequence=4.0),
    trial(0.1, 2, gold_policy=2.2, kl_per_sequence=3.0),
    trial(0.2, 1, gold_policy=1.0, kl_per_sequence=3.5),
    trial(0.2, 2, gold_policy=1.4, kl_per_sequence=2.0),
]


def test_the_best_setting_with_and_without_the_constraint() -> None:
    free, bound = page.verdicts(INFO, TRIALS)
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
def test_a_trial_without_a_value_is_named_and_the_page_is_made(
    objective: str, figures: dict[str, Any], says: str
) -> None:
    info = StudyInfo("s", "c0ffee", "leash study", objective=objective, constraint="kl_per_sequence < 3")
    trials = [*TRIALS, trial(0.3, 1, **figures)]
    last = page.verdicts(info, trials)[-1]
    assert last.startswith("Without a value: ")
    assert says in last
    assert "0.3" in page.markdown(info, trials)
    assert tables.unmeasured(info, [trial(0.3, 1, **figures)])


def test_a_list_is_a_setting_too() -> None:
    values = grid.as_values((("evaluate.extra_models", "[a]"),), {"evaluate": {"extra_models": ["a"]}})
    assert values == (("evaluate.extra_models", '["a"]'),)
    assert {values: 1}


def test_the_mean_of_two_parts_of_one_line_is_that_line() -> None:
    """Seeds reach different KL; their mean is over heights at equal KL."""
    places, heights = mean_line([[(0, 0), (1, 1), (2, 2)], [(0, 0), (1.5, 1.5), (3, 3)]])
    assert (places, heights) == ([0, 1, 2], pytest.approx([0, 1, 2]))
