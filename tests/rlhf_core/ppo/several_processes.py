"""What test_processes.py starts with `accelerate launch`: three PPO steps of the tiny trainer; the main process saves
the first gradient, the parameters after each step, the rows, and the sampled ids."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest

from rlhf_core.ppo.trainer import PPOTrainer


def main(folder: Path, options: dict[str, Any]) -> None:
    """Train, and write `run.pt`."""
    torch.set_num_threads(1)
    trainer = conftest.tiny_trainer(**options)
    gradients = record_gradients(trainer)
    rows, weights, sampled = [], [], []
    for _ in range(3):
        sampled.append(trainer.rollout().response_ids)
        rows.append(trainer.step())
        weights.append(torch.cat([p.detach().flatten() for part in trainer.models.trained().values() for p in part]))
    if trainer.processes.is_main:
        run = {"gradient": gradients[0], "weights": weights, "rows": rows, "sampled": sampled}
        torch.save(run | {"processes": trainer.processes.count}, folder / "run.pt")


def record_gradients(trainer: PPOTrainer) -> list[torch.Tensor]:
    """The whole gradient at every optimiser step, after the processes' parts were added up and clipped."""
    seen: list[torch.Tensor] = []
    drop = trainer.updater._drop_gradients

    def record() -> None:
        parts = [p for trained in trainer.models.trained().values() for p in trained if p.grad is not None]
        if parts:
            seen.append(torch.cat([p.grad.flatten() for p in parts]))
        drop()

    trainer.updater._drop_gradients = record  # type: ignore[method-assign]
    return seen


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
