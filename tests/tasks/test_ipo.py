"""Stage `ipo`: its loss, and what the stage learns on tiny models."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.ipo import IPOConfig
from rlhf_core.dpo import implicit_margin
from tasks import ipo

CONFIG = IPOConfig(enabled=True, tau=0.5, learning_rate=1e-3, epochs=4, batch_size=4, warmup_steps=1, max_tokens=64)


def test_the_loss_by_hand() -> None:
    """τ 0.25, so the target is 2 nats: a log-ratio margin of 3 nats is 1 above it, one of 0 is 2 below."""
    objective = ipo.objective(CONFIG.model_copy(update={"tau": 0.25}))
    sides = [torch.tensor(side) for side in ([-3.0, -8.0], [-6.0, -4.0], [-5.0, -8.0], [-5.0, -4.0])]
    assert objective.loss(implicit_margin(*sides, objective.scale)).item() == pytest.approx((1.0 + 4.0) / 2)


def test_the_stage_learns_to_order_pairs(run_pair_stage: Callable[..., dict[str, Any]], workshop: Path) -> None:
    metrics = run_pair_stage(ipo, CONFIG)
    assert metrics["heldout_accuracy"] > 0.8
    assert metrics["heldout_loss"] < 1.0
    with (workshop / "plots/ipo.csv").open() as file:
        first = next(csv.DictReader(file))
    assert float(first["loss"]) == pytest.approx(1.0, abs=1e-4), "1/(2τ)², where policy and reference are the same"
