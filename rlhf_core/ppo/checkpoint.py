"""A PPO run on disk: one state in one file of a sealed checkpoint, loaded without running any pickle."""

from pathlib import Path
from typing import Any

import torch

from rlhf_core.ppo.processes import Processes
from rlhf_core.training.checkpoints import Checkpoints

STATE = "state.pt"


def save(checkpoints: Checkpoints, step: int, state: dict[str, Any]) -> None:
    """Write the state after `step` steps: a kill at any moment leaves a complete checkpoint or none."""
    with checkpoints.write(step) as folder:
        torch.save(state, folder / STATE)


def load(checkpoints: Checkpoints, processes: Processes | None = None) -> dict[str, Any] | None:
    """The newest complete state, tensors on the CPU; None where there is none. Of several processes the first one finds
    it, and all read it."""
    newest = checkpoints.newest() if processes is None or processes.is_main else None
    if processes is not None:
        newest = processes.gather([newest])[0]
    return None if newest is None else read(newest / STATE)


def read(path: Path) -> dict[str, Any]:
    """Tensors and plain types; anything else in the file is refused, not run."""
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return state
