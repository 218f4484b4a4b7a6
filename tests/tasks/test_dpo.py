"""Stage `dpo` on tiny models: what it is trained on, measured on, and counts."""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.config.dpo import DPOConfig
from rlhf_core.config.lora import LoraSettings
from rlhf_core.errors import UserError
from rlhf_core.models.hf import load_causal_lm
from tasks import dpo

Rows = list[dict[str, Any]]
CONFIG = DPOConfig(enabled=True, learning_rate=1e-3, epochs=4, batch_size=4, warmup_steps=1, max_tokens=64)


@pytest.fixture
def run_dpo(run_pair_stage: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """run_dpo(rows, config=…) -> the metrics that the stage wrote."""
    return lambda rows, config=CONFIG, state="dpo": run_pair_stage(dpo, config, rows, state)


@pytest.mark.parametrize(
    "config",
    [CONFIG, CONFIG.model_copy(update={"learning_rate": 1e-2, "lora": LoraSettings(rank=2, alpha=4.0)})],
    ids=["all weights", "lora"],
)
def test_the_stage_learns_to_order_pairs_of_prompts_it_never_saw(
    config: DPOConfig, run_dpo: Callable[..., dict[str, Any]], pairs: Rows, workshop: Path
) -> None:
    metrics = run_dpo(pairs, config)
    assert metrics["heldout_accuracy"] > 0.8
    assert metrics["heldout_loss"] < math.log(2)
    assert metrics["heldout_margin"] > 0
    assert metrics["train_loss"] < math.log(2)
    with (workshop / "plots/dpo.csv").open() as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["step", "loss", "accuracy", "margin"]
    assert len(table) == 8
    assert float(table[0]["loss"]) == pytest.approx(math.log(2), abs=1e-5), "the start is its own reference"
    start, end = (load_file(workshop / f"models/{name}/model.safetensors") for name in ("sft", "dpo"))
    assert start.keys() == end.keys()
    assert any(not torch.equal(start[name], end[name]) for name in start)
    load_causal_lm(workshop / "models/dpo")


def test_the_stage_counts_what_it_was_trained_on(
    run_dpo: Callable[..., dict[str, Any]], pairs: Rows, workshop: Path
) -> None:
    """Six of seven training prompts have sampled answers, three distinct ones in two pairs; all seven are read."""
    metrics = run_dpo(pairs)
    assert (metrics["prompts"], metrics["pairs"], metrics["heldout_pairs"]) == (7, 14, 6)
    assert metrics["samples_generated"] == 0, "the pairs are there anyway, for the reward model"
    rest = run_dpo([row for row in pairs if row["source"] == "judge"], state="rest")
    assert rest["tokens_trained"] == 4 * 6 * 9
    assert metrics["tokens_trained"] > rest["tokens_trained"]
    half = run_dpo(
        [row for row in pairs if row["source"] == "judge"], CONFIG.model_copy(update={"epochs": 0.5}), "half"
    )
    assert half["tokens_trained"] == 6 * 9 / 2


def test_without_validation_pairs_nothing_can_be_said(run_dpo: Callable[..., dict[str, Any]], pairs: Rows) -> None:
    with pytest.raises(UserError, match="no validation pair is left"):
        run_dpo([row for row in pairs if row["split"] == "train"])
