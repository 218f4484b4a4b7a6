"""`checkpoint.py`: whole or not at all, the last two kept, and no pickle is run."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.ppo.checkpoint import Checkpoints


def state(step: int) -> dict[str, Any]:
    rows = [{"step": step, "gold": None, "kl": 0.5}]
    return {"trainer": {"steps_done": step, "weights": {"w": torch.full((2,), float(step))}}, "history": rows}


def test_an_empty_folder_holds_no_state(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).load() is None


def test_the_newest_state_comes_back(tmp_path: Path) -> None:
    """Also where the names would sort otherwise as text."""
    checkpoints = Checkpoints(tmp_path)
    for step in (9, 100):
        checkpoints.save(step, state(step))
    loaded = Checkpoints(tmp_path).load()
    assert loaded is not None
    assert loaded["history"] == state(100)["history"]
    assert torch.equal(loaded["trainer"]["weights"]["w"], torch.tensor([100.0, 100.0]))


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in range(1, 5):
        Checkpoints(tmp_path).save(step, state(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000003.pt", "checkpoint-00000004.pt"]


@pytest.mark.parametrize("moment", ["write", "fsync", "rename"])
def test_failure_01_a_kill_while_saving_leaves_the_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    def half(content: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "write":
            patch.setattr(torch, "save", half)
        elif moment == "fsync":
            patch.setattr(os, "fsync", killed)
        else:
            patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, state(2))
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded["trainer"]["steps_done"] == 1
    checkpoints.save(2, state(2))
    assert (checkpoints.load() or {})["trainer"]["steps_done"] == 2


class Attack:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_no_pickle_is_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save({"trainer": Attack(trace)}, tmp_path / "checkpoint-00000001.pt")
    with pytest.raises(pickle.UnpicklingError):
        Checkpoints(tmp_path).load()
    assert not trace.exists()
