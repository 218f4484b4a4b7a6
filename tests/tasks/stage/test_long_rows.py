"""Rows as token ids: a prompt that several rows share is encoded once."""

from types import SimpleNamespace
from typing import Any

import pytest

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
