"""The functions below rewards/ that `scorer` and `judge` name."""

from pathlib import Path

from rlhf_core.functions.process import Limits, RewardFunction
from tasks.params.runtime import FunctionParams
from tasks.params.scorer import FOLDER, Term, functions


def reward_functions(root: Path, terms: list[Term], limits: FunctionParams) -> dict[str, RewardFunction]:
    """By name. Their processes start at their first call. Raises UserError for a link that leads out of rewards/."""
    return {name: _function(root, name, limits, "scorer") for name in functions(terms)}


def judge_function(root: Path, name: str, limits: FunctionParams) -> RewardFunction:
    """The function of `judge.function`, as `reward_functions`."""
    return _function(root, name, limits, "judge.function")


def _function(root: Path, name: str, limits: FunctionParams, key: str) -> RewardFunction:
    return RewardFunction(root / FOLDER, name, Limits(limits.timeout_seconds, limits.memory_mb), key)
