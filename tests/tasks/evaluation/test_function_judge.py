"""A Python function as the judge of `evaluate` and `select`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import UserError
from tasks.evaluation.function_judge import function_judge_of

LONGEST = "def score(prompts, responses, rows):\n    return [row['most'] - len(r) for r, row in zip(responses, rows)]\n"


def test_a_function_scores_answers_with_the_columns_of_their_prompts(
    make_stage: Callable[..., Any], asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards/short.py").write_text(LONGEST, encoding="utf-8")
    rows = [{**row, "extra": {"most": 10 * place}} for place, row in enumerate(asked[:3])]
    rows[2].pop("extra")
    blocks = {"judge": {"kind": "function", "function": "short.py"}}
    judge = function_judge_of(make_stage("evaluate", None, [], blocks=blocks), rows)
    assert judge is not None
    assert judge.name == "rewards/short.py"
    prompts = [row["prompt"] for row in rows]
    assert judge.score([prompts[1], prompts[0], prompts[1]], ["a", "ab", ""]) == [9.0, -2.0, 10.0]
    with pytest.raises(UserError, match=r"judge\.function: short\.py: answer 1 of 1, .* KeyError: 'most'"):
        judge.score([prompts[2]], ["a"])
    with pytest.raises(ValueError, match="1 prompts and 2 responses"):
        judge.score(prompts[:1], ["a", "b"])
    judge.function.close()


def test_other_kinds_of_judge_are_no_function(make_stage: Callable[..., Any], asked: list[dict[str, Any]]) -> None:
    stage = make_stage("evaluate", None, [], blocks={"judge": {"kind": "data"}})
    assert function_judge_of(stage, asked) is None
