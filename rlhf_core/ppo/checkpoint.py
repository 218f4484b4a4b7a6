"""The state of a PPO run in a sealed checkpoint. Loading executes no pickled code."""

from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError
from rlhf_core.models import sharded_files
from rlhf_core.training.checkpoints import Checkpoints
from rlhf_core.training.processes import Processes

STATE = "state.pt"


def save(checkpoints: Checkpoints, step: int, state: dict[str, Any], processes: Processes | None = None) -> None:
    """Write the state after `step` steps, atomically. Where models are divided all processes call it, and each writes
    its parts."""
    divided = processes is not None and processes.divides_models
    if processes is not None and divided and not processes.is_main:
        sharded_files.save(processes.gather([Path()])[0] / STATE, state)
        return
    with checkpoints.write(step) as folder:
        if processes is not None and divided:
            processes.gather([folder])
        sharded_files.save(folder / STATE, state)


def load(checkpoints: Checkpoints, processes: Processes | None = None) -> dict[str, Any] | None:
    """The newest complete state, tensors on the CPU or divided as the models are; None where there is none. With
    several processes the main one chooses the checkpoint, and all load it. Raises UserError, in all of them, for one
    with a file missing."""
    newest: Path | UserError | None = None
    try:
        newest = checkpoints.newest() if processes is None or processes.is_main else None
    except UserError as error:
        newest = error
    if processes is not None:
        newest = processes.gather([newest])[0]
    if isinstance(newest, UserError):
        raise newest
    divide = processes is not None and processes.divides_models
    return None if newest is None else sharded_files.read(newest / STATE, divide)
