"""Which tokens the reward model is trained on."""

from types import SimpleNamespace
from typing import Any

import pytest

from tasks import reward


@pytest.fixture
def row() -> dict[str, Any]:
    """A pair whose chosen side was sampled in tokens that its text would not be cut into."""
    return {
        "chosen": "ab",
        "chosen_ids": [97, 98, 0],
        "chosen_ended": True,
        "rejected": "ab",
        "rejected_ids": None,
        "rejected_ended": True,
    }


def test_a_sampled_answer_keeps_its_tokens(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward, "encode_response", lambda tokenizer, text, ended: [300, 0])
    tokenizer: Any = SimpleNamespace()
    assert reward.response_tokens(tokenizer, row, "chosen") == [97, 98, 0]
    assert reward.response_tokens(tokenizer, row, "rejected") == [300, 0]
