"""Rows as token ids: a prompt that several rows share is encoded once."""

from typing import Any

import pytest

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
