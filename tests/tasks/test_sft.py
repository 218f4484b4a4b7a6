"""Stage `sft` on tiny models: the figures that it writes."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config.sft import SFTConfig
from rlhf_core.models.hf import save_checkpoint
from tasks import sft
from tests.tasks.conftest import TINY

CONFIG = SFTConfig(
    learning_rate=0.003, epochs=7, batch_size=4, micro_batch_size=2, warmup_steps=0, weight_decay=0.0, max_tokens=64,
    evaluate_every=5, patience=0,
)  # fmt: skip
OUTS = ["models/sft", "plots/sft.csv", "metrics/sft.json"]


def test_the_training_loss_is_the_mean_of_the_last_ten_steps(
    tmp_path: Path, make_stage: Callable[..., Any], asked: list[dict[str, Any]]
) -> None:
    save_checkpoint(tmp_path / "models/base", TINY.tiny_lm(), TINY.tiny_tokenizer())
    rows = [
        row | {"response": f"eat oats {'and tea ' * (place % 4)}", "split": "train" if place < 8 else "validation"}
        for place, row in enumerate(asked)
    ]
    stage = make_stage("sft", CONFIG, OUTS, {sft.DEMONSTRATIONS: rows})
    sft.execute(stage)
    stage.outputs.commit()
    with (tmp_path / "plots/sft.csv").open() as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert len(losses) == 14
    assert json.loads((tmp_path / "metrics/sft.json").read_text())["train_loss"] == pytest.approx(
        sum(losses[-10:]) / 10
    )
