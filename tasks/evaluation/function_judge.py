"""The judge of the block `judge` that is a Python function: it scores single answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.data.chat import Conversation, prompt_id
from rlhf_core.functions.process import RewardFunction
from tasks.datasets.jsonl import Row
from tasks.params.judge import JudgeParams
from tasks.stage.stage import Stage
from tasks.training.functions import judge_function
from tasks.training.scorer import extras_of


@dataclass(frozen=True)
class FunctionJudge:
    """A function as a `Judge` of answers to known prompts."""

    function: RewardFunction
    extras: Mapping[str, Mapping[str, object]]
    """The further columns of each prompt's row, by its id."""

    @property
    def name(self) -> str:
        """The name in tables and pictures: the file."""
        return self.function.where

    def score(self, prompts: Sequence[Conversation], responses: Sequence[str]) -> list[float]:
        """See `Judge`. Raises UserError, naming the answer, where the function has no number for it."""
        if len(prompts) != len(responses):
            raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses")
        return self.function(prompts, responses, [self.extras[prompt_id(prompt)] for prompt in prompts])


def function_judge_of(stage: Stage[Any], rows: Sequence[Row]) -> FunctionJudge | None:
    """The function of `judge.function`, for answers to the prompts of `rows`; None with another kind of judge."""
    name = stage.block("judge", JudgeParams).function
    if name is None:
        return None
    extras = zip((row["prompt_id"] for row in rows), extras_of(rows), strict=True)
    return FunctionJudge(judge_function(stage.root, name, stage.runtime.functions), dict(extras))
