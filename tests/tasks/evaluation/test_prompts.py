"""Evaluation prompts: held-out prompts or a user's file; bad rows and training prompts are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.data.chat import prompt_id
from rlhf_core.errors import UserError
from tasks.evaluation.prompts import HELDOUT, TRAINING, evaluation_prompts
from tasks.params.evaluate import EvaluateParams

Ask = Callable[..., list[dict[str, Any]]]
KNOWN = "What is known to everybody?"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def settings(prompts: str, most: int = 100) -> EvaluateParams:
    return EvaluateParams(
        prompts=prompts, max_prompts=most, seeds=[1], temperature=1.0, max_new_tokens=8, batch_size=4, stop_tokens=[],
        bootstrap=100,
    )  # fmt: skip


@pytest.fixture
def answer(make_stage: Callable[..., Any], tmp_path: Path) -> Ask:
    """ask("heldout", most=…) or ask("mine.jsonl", rows, …): the prompts; one training prompt, in the last dataset."""

    def call(name: str, rows: list[Any] | None = None, most: int = 100) -> list[dict[str, Any]]:
        if rows is not None:
            (tmp_path / "data/raw").mkdir(parents=True, exist_ok=True)
            lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
            (tmp_path / "data/raw" / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        heldout = [{"prompt_id": str(n), "prompt": user(f"question {n}"), "response": None} for n in range(5)]
        known = {path: [{"prompt_id": "x", "prompt": user(f"{path} 1")}] for path in TRAINING}
        known[TRAINING[-1]].append({"prompt_id": "y", "prompt": user(KNOWN)})
        return evaluation_prompts(make_stage("best_of_n", None, [], {HELDOUT: heldout, **known}), settings(name, most))

    return call


def test_the_first_held_out_prompts(answer: Ask) -> None:
    assert [row["prompt_id"] for row in answer("heldout", most=3)] == ["0", "1", "2"]
    assert len(answer("heldout")) == 5


def test_a_file_of_prompts(answer: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    """Text, conversations, and one prompt twice; other columns are ignored."""
    rows: list[Any] = [{"prompt": "one?", "topic": "x"}, {"prompt": user("two?")}, {"prompt": "one?"}, {"prompt": "3?"}]
    found = answer("mine.jsonl", rows)
    assert [row["prompt"] for row in found] == [user("one?"), user("two?"), user("3?")]
    assert all(row["prompt_id"] == prompt_id(row["prompt"]) and row["response"] is None for row in found)
    assert [row["prompt"] for row in answer("mine.jsonl", most=1)] == [user("one?")]
    assert "the first 1 of 3" in capsys.readouterr().out


def test_a_file_of_messages_brings_demonstrations(answer: Ask) -> None:
    (row,) = answer("mine.jsonl", [{"messages": [*user("one?"), {"role": "assistant", "content": "yes"}]}])
    assert (row["prompt"], row["response"]) == (user("one?"), "yes")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"prompt": "one?"}, {"prompt": 7}], "mine.jsonl, row 2: prompt: expected text"),
        ([{"prompt": "one?"}, {"body": "two?"}], "mine.jsonl, row 2: missing column prompt"),
        ([{"prompt": "one?"}, {"prompt": "  "}], "empty 1 (first: data/raw/mine.jsonl, row 2)"),
        (
            [{"messages": user("one?")}],
            "bad_conversation 1 (first: data/raw/mine.jsonl, row 1: messages: the last turn is user",
        ),
        ([{"prompt": "one?"}, "{"], "mine.jsonl, row 2: broken JSON"),
        ([], "data/raw/mine.jsonl has no rows"),
    ],
)
def test_bad_rows_are_named(rows: list[Any], says: str, answer: Ask) -> None:
    with pytest.raises(UserError) as refused:
        answer("mine.jsonl", rows)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_training_prompts_are_refused_with_their_number(answer: Ask) -> None:
    """Also in other case and white space, and beyond `max_prompts`."""
    leaked = [{"prompt": "new?"}, {"prompt": KNOWN.upper() + " "}, {"prompt": f"{TRAINING[0]} 1"}]
    with pytest.raises(UserError, match=r"2 of 3 prompts of data/raw/mine\.jsonl are training prompts") as refused:
        answer("mine.jsonl", leaked, most=1)
    assert "WHAT IS KNOWN" in str(refused.value)
    assert TRAINING[-1] in str(refused.value)


def test_the_file_lies_below_data_raw(answer: Ask, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data/raw/none\.jsonl not found"):
        answer("none.jsonl")
    with pytest.raises(UserError, match=r"no \*\.jsonl file"):
        answer("table.csv", ["prompt", "one?"])
    (tmp_path / "outside.jsonl").write_text('{"prompt": "one?"}\n')
    (tmp_path / "data/raw/link.jsonl").symlink_to(tmp_path / "outside.jsonl")
    with pytest.raises(UserError, match="leads out of data/raw"):
        answer("link.jsonl")


def test_whole_texts_are_no_evaluation_prompts(answer: Ask) -> None:
    with pytest.raises(
        UserError, match=r"evaluate\.prompts: data/raw/mine\.jsonl has the column text; write the openings"
    ):
        answer("mine.jsonl", [{"text": "The film is a joy."}])
