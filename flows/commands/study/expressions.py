"""Expressions over the metrics of a run: what a study maximises, and what must hold.

`gold_policy` is a number of metrics/evaluate.json, `reward.heldout_accuracy` one of metrics/reward.json.
"""

import ast
from collections.abc import Mapping
from typing import Any

from simpleeval import FeatureNotAvailable, InvalidExpression, SimpleEval

from flows.commands.study.trials import Call, Trial
from rlhf_core.errors import UserError, did_you_mean

FUNCTIONS = {"min": min, "max": max, "abs": abs}
NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Name, ast.Attribute, ast.Call, ast.Constant),
    *(ast.Load, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
FIRST = "evaluate"
"""Whose numbers have no prefix."""


def check(expression: str) -> None:
    """Raise UserError for what is no expression of numbers, names, arithmetic, comparisons, and, or, not, min, max and
    abs."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise UserError(f"{expression!r}: {error.msg}; write for example gold_policy - 0.1 * kl_per_sequence") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS):
            raise UserError(f"{expression!r}: only min, max and abs can be called")
        if not isinstance(node, NODES) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            raise UserError(f"{expression!r}: only numbers, names of metrics, arithmetic and comparisons are allowed")


def evaluate(expression: str, metrics: Mapping[str, Mapping[str, Any]]) -> float:
    """Its value; a comparison gives 1 or 0. Raises UserError for an unknown name, and for what is not a number."""
    check(expression)
    names = {name: dict(content) for name, content in metrics.items()} | dict(metrics.get(FIRST, {}))
    try:
        value = SimpleEval(names=names, functions=FUNCTIONS).eval(expression.strip())
        if isinstance(value, int | float):
            return float(value)
    except (InvalidExpression, FeatureNotAvailable, TypeError, ArithmeticError, KeyError) as error:
        unknown = str(getattr(error, "name", None) or getattr(error, "attr", None) or "")
        hint = did_you_mean(unknown, names) if unknown else ""
        raise UserError(f"{expression!r}: {error}{hint}") from None
    raise UserError(f"{expression!r} is not a number in these metrics (it is {value!r})")


def violation(constraint: str, metrics: Mapping[str, Mapping[str, Any]]) -> float:
    """By how much a constraint is violated, 0 or less where it holds: a − b for `a < b`, b − a for `a > b`; 1 or −1 for
    what is no comparison of two numbers."""
    tree = ast.parse(constraint.strip(), mode="eval").body
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
        left, right = (evaluate(ast.unparse(side), metrics) for side in (tree.left, tree.comparators[0]))
        if isinstance(tree.ops[0], ast.Lt | ast.LtE):
            return left - right
        if isinstance(tree.ops[0], ast.Gt | ast.GtE):
            return right - left
    return -1.0 if evaluate(constraint, metrics) else 1.0


def measure(call: Call, trial: Trial) -> None:
    """Set objective and violation of a finished trial, or why they have no value."""
    try:
        trial.objective = evaluate(call.aim, trial.metrics) if call.aim else None
        trial.violation = violation(call.constraint, trial.metrics) if call.constraint else None
    except UserError as error:
        trial.unmeasured = f"{trial.name}: {error}"
