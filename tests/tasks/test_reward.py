"""Stage `reward`: which tokens the model is trained on, and the plain folder that LoRA leaves."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tasks.training import pairs as comparisons

if TYPE_CHECKING:
    from tests.conftest import Ended, Project


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
    monkeypatch.setattr(comparisons, "prompts_once", lambda tokenizer: lambda row: [row["prompt"]])
    row |= {"rejected_ids": [99, 0]}
    rows = [
        row | {"prompt_id": str(n), "prompt": n, "split": "validation" if n % 3 == 0 else "train"} for n in range(9)
    ]
    stage: Any = SimpleNamespace(read=lambda path: rows, common=SimpleNamespace(long_rows="refuse"))
    prompts = {
        split: {c.prompt[0] for c in comparisons.comparisons(stage, SimpleNamespace(), split, 10)[0]}  # type: ignore[arg-type]
        for split in ("train", "validation")
    }
    assert prompts == {"train": {1, 2, 4, 5, 7, 8}, "validation": {0, 3, 6}}


def test_a_sampled_answer_keeps_its_tokens(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparisons, "encode_response", lambda tokenizer, text, ended: [300, 0])
    tokenizer: Any = SimpleNamespace()
    assert comparisons.response_tokens(tokenizer, row, "chosen") == [97, 98, 0]
    assert comparisons.response_tokens(tokenizer, row, "rejected") == [300, 0]


def test_lora_leaves_a_plain_merged_folder(
    finished: "Project", stage_main: Callable[["Project", str], "Ended"]
) -> None:
    """The same files and weights' names as without LoRA, and a body that
    differs from SFT's in its linear layers alone."""
    folder = finished.root / "models/reward"
    before = {path.name for path in folder.iterdir()}
    names = load_file(folder / "model.safetensors").keys()
    finished.set("reward.lora", {"rank": 2, "alpha": 4.0})
    finished.set("reward.epochs", 4)  # in one epoch the tiny run has one step, whose learning rate is 0
    finished.set("runtime.tracking", False)
    ended = stage_main(finished, "reward")
    assert ended.code == 0, ended.stderr

    assert {path.name for path in folder.iterdir()} == before
    weights, sft = load_file(folder / "model.safetensors"), load_file(finished.root / "models/sft/model.safetensors")
    assert weights.keys() == names
    changed = {name for name in weights.keys() & sft.keys() if not torch.equal(weights[name], sft[name])}
    assert changed == {name for name in weights if name.endswith("proj.weight")}
    model, loading = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.config.num_labels == 1
