"""Stage base: what the tokenizer and the base model learn from."""

from collections.abc import Callable
from typing import Any

import pytest

from rlhf_core.data.chat import prompt_id
from tasks.base import DEMONSTRATIONS, PAIRS, execute
from tasks.params.base import BaseParams
from tasks.schemas.datasets import SCHEMAS
from tasks.stage.stage import Stage

SCRATCH = {"vocabulary": 300, "context": 32, "layers": 1, "hidden": 8, "intermediate": 8, "heads": 1}
PARAMS = BaseParams.model_validate(
    {
        "source": "scratch", "scratch": SCRATCH, "pretrain": {"steps": 1, "batch_size": 2, "learning_rate": 1e-3},
        "pad_token": "<|pad|>", "eos_token": "<|end|>",
    }
)  # fmt: skip
PROMPT = [{"role": "user", "content": "hello"}]
ROW = {"prompt_id": prompt_id(PROMPT), "prompt": PROMPT, "split": "train"}
Base = Callable[..., dict[str, bytes]]


@pytest.fixture
def base(make_stage: Callable[..., Stage[Any]]) -> Base:
    """base(pair) -> the files of models/base, made from demonstrations and this pair."""

    def make(**pair: Any) -> dict[str, bytes]:
        rows = {path: [] for path in SCHEMAS if path.startswith("data/ingest/")} | {
            DEMONSTRATIONS: [{**ROW, "response": text} for text in ("good morning", "good evening") * 10],
            PAIRS: [{**ROW, **pair}] if pair else [],
        }
        state = f"base-{pair.get('from_labels')}"
        stage = make_stage("base", PARAMS, ["models/base", "metrics/base.json"], rows, state=state)
        execute(stage)
        return {path.name: path.read_bytes() for path in stage.out("models/base").iterdir()}

    return make


def test_pairs_of_the_data_are_learned_and_labels_that_were_added_are_not(base: Base) -> None:
    """Else a new label changes the SFT model that a later round goes on from."""
    pair = {"chosen": "zebra zebra zebra", "rejected": "quagga quagga"}
    without = base()
    assert base(**pair, annotator="anna", from_labels=True) == without
    of_data = base(**pair, annotator=None, from_labels=False)
    assert of_data["tokenizer.json"] != without["tokenizer.json"]
    assert of_data["model.safetensors"] != without["model.safetensors"]
