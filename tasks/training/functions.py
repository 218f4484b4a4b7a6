"""The reward functions that `scorer` names."""

from pathlib import Path

from rlhf_core.functions.process import Limits, RewardFunction
from tasks.params.runtime import FunctionParams
from tasks.params.scorer import FOLDER, Term, functions


def reward_functions(root: Path, terms: list[Term], limits: FunctionParams) -> dict[str, RewardFunction]:
    """By name. Their processes start at their first call. Raises UserError for a link that leads out of rewards/."""
    allowed = Limits(limits.timeout_seconds, limits.memory_mb)
    return {name: RewardFunction(root / FOLDER, name, allowed) for name in functions(terms)}
