"""`ppo/checkpoint.py`: a state comes back as it was, and no pickle is run."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.training import state as checkpoint
from rlhf_core.training.checkpoints import Checkpoints


def state(step: int) -> dict[str, Any]:
    rows = [{"step": step, "gold": None, "kl": 0.5}]
    return {"trainer": {"steps_done": step, "weights": {"w": torch.full((2,), float(step))}}, "history": rows}


def test_an_empty_folder_holds_no_state(tmp_path: Path) -> None:
    assert checkpoint.load(Checkpoints(tmp_path)) is None


def test_failure_01_the_newest_whole_state_comes_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, lambda _: None)
    for step in (9, 100):
        checkpoint.save(checkpoints, step, state(step))
    loaded = checkpoint.load(checkpoints)
    assert loaded is not None
    assert loaded["history"] == state(100)["history"]
    assert torch.equal(loaded["trainer"]["weights"]["w"], torch.tensor([100.0, 100.0]))
    file = tmp_path / "checkpoint-100" / checkpoint.STATE
    file.write_bytes(file.read_bytes()[:-1])
    assert (checkpoint.load(checkpoints) or {})["trainer"]["steps_done"] == 9


def test_the_main_process_chooses_the_checkpoint_for_all(tmp_path: Path) -> None:
    """The others neither judge nor remove: two that did would stumble over each other."""
    checkpoints = Checkpoints(tmp_path, lambda _: None)
    for step in (1, 2):
        checkpoint.save(checkpoints, step, state(step))
    (tmp_path / "checkpoint-2" / checkpoint.STATE).write_bytes(b"damaged")
    found = tmp_path / "checkpoint-1"
    follower: Any = SimpleNamespace(is_main=False, divides_models=False, gather=lambda items: [found, *items])
    assert (checkpoint.load(checkpoints, follower) or {})["trainer"]["steps_done"] == 1
    assert (tmp_path / "checkpoint-2").exists()
    leader: Any = SimpleNamespace(is_main=True, divides_models=False, gather=lambda items: [*items, None])
    assert (checkpoint.load(checkpoints, leader) or {})["trainer"]["steps_done"] == 1
    assert not (tmp_path / "checkpoint-2").exists()


class Attack:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_no_pickle_is_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    checkpoints = Checkpoints(tmp_path)
    checkpoint.save(checkpoints, 1, {"trainer": Attack(trace)})
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.load(checkpoints)
    assert not trace.exists()
