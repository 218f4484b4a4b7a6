"""The state of a PPO run in a sealed checkpoint. Loading executes no pickled code."""

from pathlib import Path
from typing import Any

import torch

from rlhf_core.ppo.processes import Processes
from rlhf_core.training.checkpoints import Checkpoints

STATE = "state.pt"


def save(checkpoints: Checkpoints, step: int, state: dict[str, Any]) -> None:
    """Write the state after `step` steps, atomically."""
    with checkpoints.write(step) as folder:
        torch.save(state, folder / STATE)


def load(checkpoints: Checkpoints, processes: Processes | None = None) -> dict[str, Any] | None:
    """The newest complete state, tensors on the CPU; None where there is none. With several processes the main one
    chooses the checkpoint, and all load it."""
    newest = checkpoints.newest() if processes is None or processes.is_main else None
    if processes is not None:
        newest = processes.gather([newest])[0]
    return None if newest is None else read(newest / STATE)


def read(path: Path) -> dict[str, Any]:
    """Tensors and plain types; a file with anything else is refused."""
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return state
