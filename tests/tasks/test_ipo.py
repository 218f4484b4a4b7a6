"""Stage `ipo`: its loss, and what the stage learns on tiny models."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.ipo import IPOConfig
from tasks import ipo

CONFIG = IPOConfig(enabled=True, tau=0.5, learning_rate=1e-3, epochs=4, batch_size=4, warmup_steps=1, max_tokens=64)


def test_the_objective_has_the_stages_tau() -> None:
    objective = ipo.objective(CONFIG)
    assert (objective.scale, objective.loss(torch.tensor([0.0])).item()) == (0.5, pytest.approx(1.0))


def test_the_stage_learns_to_order_pairs(run_pair_stage: Callable[..., dict[str, Any]], workshop: Path) -> None:
    metrics = run_pair_stage(ipo, CONFIG)
    assert metrics["heldout_accuracy"] > 0.8
    assert metrics["heldout_loss"] < 1.0
    with (workshop / "plots/ipo.csv").open() as file:
        first = next(csv.DictReader(file))
    assert float(first["loss"]) == pytest.approx(1.0, abs=1e-4), "1/(2τ)², where policy and reference are the same"
