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


def test_failure_05_pairs_are_trained_on_or_measured_on_and_never_both(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward, "encode_prompt", lambda tokenizer, prompt: [prompt])
    row |= {"rejected_ids": [99, 0]}
    rows = [
        row | {"prompt_id": str(n), "prompt": n, "split": "validation" if n % 3 == 0 else "train"} for n in range(9)
    ]
    stage: Any = SimpleNamespace(read=lambda path: rows, common=SimpleNamespace(long_rows="refuse"))
    prompts = {
        split: {c.prompt[0] for c in reward.comparisons(stage, SimpleNamespace(), split, 10)[0]}  # type: ignore[arg-type]
        for split in ("train", "validation")
    }
    assert prompts == {"train": {1, 2, 4, 5, 7, 8}, "validation": {0, 3, 6}}


def test_a_sampled_answer_keeps_its_tokens(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward, "encode_response", lambda tokenizer, text, ended: [300, 0])
    tokenizer: Any = SimpleNamespace()
    assert reward.response_tokens(tokenizer, row, "chosen") == [97, 98, 0]
    assert reward.response_tokens(tokenizer, row, "rejected") == [300, 0]
