"""Rows as token ids: a prompt that several rows share is encoded once."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.data.tokenizer import TEXT_TEMPLATE
from rlhf_core.errors import UserError
from tasks.stage import long_rows


def test_a_prompt_is_encoded_once_for_all_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []

    def encode(tokenizer: Any, prompt: list[int]) -> list[int]:
        encoded.append(prompt)
        return [*prompt, 0]

    monkeypatch.setattr(long_rows, "encode_prompt", encode)
    tokenizer: Any = object()
    prompt_ids = long_rows.prompts_once(tokenizer)
    rows = [{"prompt_id": name, "prompt": [ord(name)]} for name in "aba"]
    assert [prompt_ids(row) for row in rows] == [[97, 0], [98, 0], [97, 0]]
    assert encoded == [[97], [98]]
    assert long_rows.prompt_encoder(tokenizer)(rows[1]) == ([98, 0], 2)


def test_an_error_of_a_row_names_its_place() -> None:
    def encode(row: dict[str, Any]) -> tuple[None, int]:
        if row["role"] == "system":
            raise UserError("the chat template has no system messages")
        return None, 1

    stage: Any = SimpleNamespace(common=SimpleNamespace(long_rows="drop"))
    rows = [{"role": "user"}, {"role": "system"}]
    with pytest.raises(UserError, match=r"^data/x\.jsonl, row 2: the chat template has no system messages$"):
        long_rows.fitting(stage, "data/x.jsonl", rows, encode, 5)


class Warned:
    """A stage that drops rows, and keeps its warnings and log."""

    def __init__(self) -> None:
        self.common = SimpleNamespace(long_rows="drop")
        self.warned, self.logged = list[str](), list[str]()
        self.warn, self.log = self.warned.append, self.logged.append


def test_many_long_rows_are_warned_of_with_the_length_that_holds_most() -> None:
    stage: Any = Warned()
    rows = [{"tokens": tokens} for tokens in [*range(1, 20), 99]]
    kept, dropped = long_rows.fitting(stage, "data/x.jsonl", rows, lambda row: (None, row["tokens"]), 10, key="sft.max")
    assert (len(kept), dropped, stage.logged) == (10, 10, [])
    assert stage.warned == [
        "data/x.jsonl: 10 of 20 rows (50%) have more than 10 tokens and were dropped; 95% of the rows need 19 tokens "
        "or less: raise sft.max"
    ]
    long_rows.fitting(stage, "data/x.jsonl", rows, lambda row: (None, row["tokens"]), 18)
    assert stage.logged == ["data/x.jsonl: 2 of 20 rows are too long and were dropped"]


def test_answers_without_an_end_are_warned_of_where_they_need_one() -> None:
    stage: Any = Warned()
    chat: Any = SimpleNamespace(chat_template="chat")
    text: Any = SimpleNamespace(chat_template=TEXT_TEMPLATE)
    long_rows.warn_of_cut_answers(stage, text, "sft", [True] * 10, 64, "evaluate.max_new_tokens")
    long_rows.warn_of_cut_answers(stage, chat, "sft", [True] * 2 + [False] * 8, 64, "evaluate.max_new_tokens")
    assert stage.warned == []
    long_rows.warn_of_cut_answers(stage, chat, "sft", [True] * 3 + [False] * 7, 64, "evaluate.max_new_tokens")
    assert "3 of 10 answers of sft (30%) are cut off at 64 tokens; raise evaluate.max_new_tokens" in stage.warned[0]
