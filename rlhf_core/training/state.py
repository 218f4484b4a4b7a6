"""The state of a training in a sealed checkpoint. Loading executes no pickled code."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core import files
from rlhf_core.errors import UserError
from rlhf_core.models import sharded_files
from rlhf_core.training.checkpoints import Checkpoints
from rlhf_core.training.processes import Processes

STATE = "state.pt"


def save(
    checkpoints: Checkpoints,
    step: int,
    state: dict[str, Any],
    processes: Processes | None = None,
    keep: Sequence[Path] = (),
) -> None:
    """Write the state after `step` steps, and the files `keep` if they are there, atomically. Where models are divided
    all processes call it, and each writes its parts."""
    divided = processes is not None and processes.divides_models
    if processes is not None and divided and not processes.is_main:
        sharded_files.save(processes.gather([Path()])[0] / STATE, state)
        return
    with checkpoints.write(step) as folder:
        if processes is not None and divided:
            processes.gather([folder])
        sharded_files.save(folder / STATE, state)
        for path in keep:
            if path.exists():
                files.link(path, folder / path.name)


def newest(checkpoints: Checkpoints, processes: Processes | None = None) -> Path | None:
    """The folder of the newest complete state; None where there is none. With several processes the main one chooses
    it, and all get it. Raises UserError, in all of them, for one with a file missing."""
    found: Path | UserError | None = None
    try:
        found = checkpoints.newest() if processes is None or processes.is_main else None
    except UserError as error:
        found = error
    if processes is not None:
        found = processes.gather([found])[0]
    if isinstance(found, UserError):
        raise found
    return found


def load(checkpoints: Checkpoints, processes: Processes | None = None) -> dict[str, Any] | None:
    """The newest complete state, tensors on the CPU or divided as the models are; see `newest`."""
    folder = newest(checkpoints, processes)
    divide = processes is not None and processes.divides_models
    return None if folder is None else sharded_files.read(folder / STATE, divide)
