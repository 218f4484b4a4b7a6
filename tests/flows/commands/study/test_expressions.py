"""Objective and constraint: what may be written, what it means, and what cannot be done with it."""

import pytest

from flows.commands.study.expressions import evaluate, violation
from rlhf_core.errors import UserError

METRICS = {
    "evaluate": {"gold_policy": 3.0, "kl_per_sequence": 2.5, "judge": "a rubric", "nothing": None},
    "ppo": {"kl": 2.0},
}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("gold_policy", 3.0),
        ("gold_policy - 0.1 * kl_per_sequence", 2.75),
        ("ppo.kl < 3 and gold_policy > 2", 1.0),
        ("max(ppo.kl, -abs(gold_policy))", 2.0),
    ],
)
def test_values(expression: str, value: float) -> None:
    assert evaluate(expression, METRICS) == pytest.approx(value)


@pytest.mark.parametrize(
    ("constraint", "amount"),
    [
        ("kl_per_sequence < 3", -0.5),
        ("kl_per_sequence <= 2", 0.5),
        ("gold_policy > 3.5", 0.5),
        ("gold_policy > 2 and ppo.kl > 3", 1.0),
        ("gold_policy == 3", -1.0),
    ],
)
def test_violations(constraint: str, amount: float) -> None:
    assert violation(constraint, METRICS) == pytest.approx(amount)


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("gold_polcy", "did you mean gold_policy?"),
        ("ppo.kk", "kk"),
        ("judge", "is not a number"),
        ("nothing", "is not a number"),
        ("nothing + 1", "'nothing + 1': "),
        ("gold_policy / 0", "division by zero"),
        ("gold_policy <", "invalid syntax"),
        ("__import__('os').system('true')", "only "),
        ("ppo.items()", "only min, max and abs can be called"),
        ("gold_policy.__class__", "'gold_policy.__class__': "),
        ("[1][0]", "only numbers"),
        ("'text'", "only numbers"),
        ("2 ** 999999", "'2 ** 999999': "),
    ],
)
def test_what_is_refused_in_one_line(expression: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        evaluate(expression, METRICS)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
