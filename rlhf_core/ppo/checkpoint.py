"""The state of a PPO run in a sealed checkpoint. Loading executes no pickled code."""

from pathlib import Path
from typing import Any

import torch

from rlhf_core.models import sharded_files
from rlhf_core.ppo.processes import Processes
from rlhf_core.training.checkpoints import Checkpoints

STATE = "state.pt"
DIVIDED = "divided"
"""The folder of the tensors that are divided over processes, in a checkpoint; and the key of their number of files."""


def save(checkpoints: Checkpoints, step: int, state: dict[str, Any], processes: Processes | None = None) -> None:
    """Write the state after `step` steps, atomically. Where models are divided all processes call it, and each writes
    its parts."""
    rest, divided = sharded_files.split(state)
    if processes is None or not processes.divides_models:
        with checkpoints.write(step) as folder:
            torch.save(state, folder / STATE)
        return
    if not processes.is_main:
        sharded_files.write(processes.gather([Path()])[0] / DIVIDED, divided)
        return
    with checkpoints.write(step) as folder:
        processes.gather([folder])
        sharded_files.write(folder / DIVIDED, divided)
        torch.save(rest | {DIVIDED: sharded_files.count(folder / DIVIDED)}, folder / STATE)


def load(checkpoints: Checkpoints, processes: Processes | None = None) -> dict[str, Any] | None:
    """The newest complete state, tensors on the CPU or divided as the models are; None where there is none. With
    several processes the main one chooses the checkpoint, and all load it. Raises UserError for one with a part
    missing."""
    newest = checkpoints.newest() if processes is None or processes.is_main else None
    if processes is not None:
        newest = processes.gather([newest])[0]
    return None if newest is None else read(newest / STATE, processes is not None and processes.divides_models)


def read(path: Path, divided: bool = False) -> dict[str, Any]:
    """Tensors and plain types; a file with anything else is refused."""
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    if (files := state.pop(DIVIDED, None)) is None:
        return state
    whole: dict[str, Any] = sharded_files.join(state, path.parent / DIVIDED, files, divided)
    return whole
