"""Resumable state with a malicious pickle: the functions that load it refuse it, even where torch's own safety is
switched off from outside. (Seals, which find such a file before, are tested in tests/faults/.)"""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf_core.models import sharded_files
from rlhf_core.training.state import STATE

Arm = Callable[..., Path]


@pytest.fixture(autouse=True)
def _unsafe_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's environment may make torch unpickle by default."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


@pytest.mark.parametrize("wrapped", [True, False], ids=["torch", "plain pickle"])
def test_an_armed_checkpoint_never_fires(tmp_path: Path, arm: Arm, wrapped: bool) -> None:
    path = tmp_path / STATE
    mark = arm(path, wrapped)
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        sharded_files.read(path)
    assert not mark.exists()


def test_the_armed_files_are_armed(tmp_path: Path, arm: Arm) -> None:
    """The other tests could not fail otherwise."""
    for wrapped in (True, False):
        mark = arm(tmp_path / "armed", wrapped)
        if wrapped:
            torch.load(tmp_path / "armed", weights_only=False)
        else:
            pickle.loads((tmp_path / "armed").read_bytes())
        assert mark.is_dir()
