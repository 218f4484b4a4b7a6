"""Files that later stages read through `ingest`: prompts, texts, the hashes of a model. Bad ones are refused."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.data.chat import prompt_id
from rlhf_core.errors import UserError
from tasks.datasets.named import read_prompts, read_text, refuse_training_prompts
from tasks.datasets.raw import hashes_of_files

KNOWN = "What is known to all of us?"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


Named = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def named(tmp_path: Path) -> Named:
    """named("mine.jsonl", rows): the prompts of a file with these rows."""

    def call(name: str, rows: list[Any] | None = None) -> list[dict[str, Any]]:
        raw = tmp_path / "data/raw"
        if rows is not None:
            raw.mkdir(parents=True, exist_ok=True)
            lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
            (raw / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return read_prompts(raw, name)

    return call


def test_a_file_of_prompts(named: Named) -> None:
    """Text, conversations, and one prompt twice; other columns are ignored."""
    rows: list[Any] = [{"prompt": "one?", "topic": "x"}, {"prompt": user("two?")}, {"prompt": "one?"}, {"prompt": "3?"}]
    found = named("mine.jsonl", rows)
    assert [row["prompt"] for row in found] == [user("one?"), user("two?"), user("3?")]
    assert all(row["prompt_id"] == prompt_id(row["prompt"]) and row["response"] is None for row in found)


def test_a_file_of_messages_brings_demonstrations(named: Named) -> None:
    (row,) = named("mine.jsonl", [{"messages": [*user("one?"), {"role": "assistant", "content": "yes"}]}])
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
def test_bad_rows_are_named(rows: list[Any], says: str, named: Named) -> None:
    with pytest.raises(UserError) as refused:
        named("mine.jsonl", rows)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_training_prompts_are_refused_with_their_number(named: Named) -> None:
    """Also in other case and white space."""
    rows = named("mine.jsonl", [{"prompt": "new?"}, {"prompt": KNOWN.upper() + " "}, {"prompt": "first?"}])
    training = {"one": [{"prompt": user("first?")}], "other": [{"prompt": user(KNOWN)}]}
    with pytest.raises(UserError, match=r"2 of 3 prompts of data/raw/mine\.jsonl are training prompts") as refused:
        refuse_training_prompts("mine.jsonl", rows, training)
    assert "WHAT IS KNOWN" in str(refused.value)
    assert "(in other)" in str(refused.value)


def test_the_file_lies_below_data_raw(named: Named, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data/raw/none\.jsonl not found"):
        named("none.jsonl")
    with pytest.raises(UserError, match=r"no \*\.jsonl file"):
        named("table.csv", ["prompt", "one?"])
    (tmp_path / "outside.jsonl").write_text('{"prompt": "one?"}\n')
    (tmp_path / "data/raw/link.jsonl").symlink_to(tmp_path / "outside.jsonl")
    with pytest.raises(UserError, match="leads out of data/raw"):
        named("link.jsonl")


def test_whole_texts_are_no_evaluation_prompts(named: Named) -> None:
    with pytest.raises(
        UserError, match=r"evaluate\.prompts: data/raw/mine\.jsonl has the column text; write the openings"
    ):
        named("mine.jsonl", [{"text": "The film is a joy."}])


def test_a_text_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes("Ein Käse.\r\nNoch einer.".encode())
    assert read_text(tmp_path, "text.txt") == "Ein Käse.\r\nNoch einer."
    (tmp_path / "text.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"ppo\.ptx\.file: data/raw/text\.txt is not UTF-8 \(byte 3\)"):
        read_text(tmp_path, "text.txt")
    (tmp_path / "text.txt").write_text(" \n")
    with pytest.raises(UserError, match="holds no text"):
        read_text(tmp_path, "text.txt")
    with pytest.raises(UserError, match=r"cannot read data/raw/none\.txt"):
        read_text(tmp_path, "none.txt")


def test_the_hashes_of_a_model_are_of_its_files_alone(tmp_path: Path) -> None:
    (tmp_path / "model/part").mkdir(parents=True)
    (tmp_path / "model/part/weights").write_text("1")
    (tmp_path / "README.md").write_text("other")
    found = hashes_of_files(tmp_path, "model")
    assert found == {"part/weights": hashlib.sha256(b"1").hexdigest()}
    assert hashes_of_files(tmp_path, None) == hashes_of_files(tmp_path, "owner/model-of-the-hub") == {}
    (tmp_path / "model/part/weights").write_text("2")
    assert hashes_of_files(tmp_path, "model") != found
