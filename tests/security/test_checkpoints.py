"""Resumable state with a malicious pickle: the functions that load it refuse it, even where torch's own safety is
switched off from outside. (Seals, which find such a file before, are tested in tests/faults/.)"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from rlhf_core.models import sharded_files
from rlhf_core.training.run import Run, Schedule, trainer_arguments

Arm = Callable[..., Path]
PARTS: dict[str, Callable[[Trainer, str], object]] = {
    "optimizer.pt": lambda trainer, folder: trainer._load_optimizer_and_scheduler(folder),
    "scheduler.pt": lambda trainer, folder: trainer._load_optimizer_and_scheduler(folder),
    "rng_state.pth": lambda trainer, folder: trainer._load_rng_state(folder),
    "training_args.bin": lambda trainer, folder: trainer._load_from_checkpoint(folder),
    "pytorch_model.bin": lambda trainer, folder: trainer._load_from_checkpoint(folder),
}
"""What a checkpoint of a Trainer holds, and what reads it."""


@pytest.fixture(autouse=True)
def _unsafe_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's environment may make torch unpickle by default."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Trainer, Path]:
    """A Trainer after one step, and its checkpoint."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    run = Run(state_dir=tmp_path, seed=1, report=lambda *_: None, checkpoint_every=1)
    schedule = Schedule(learning_rate=1e-3, batch_size=1, micro_batch_size=1, warmup_steps=0, weight_decay=0.0)
    ids = torch.tensor([3, 4, 5])
    rows: Any = [{"input_ids": ids, "labels": ids}]
    trainer = Trainer(LlamaForCausalLM(config), trainer_arguments(run, schedule), train_dataset=rows)
    trainer.train()
    return trainer, tmp_path / "trainer" / "checkpoint-1"


@pytest.mark.slow
@pytest.mark.chosen(
    "optimizer.pt-torch",
    "scheduler.pt-plain pickle",
    "rng_state.pth-torch",
    "training_args.bin-plain pickle",
    "pytorch_model.bin-torch",
)
@pytest.mark.parametrize("wrapped", [True, False], ids=["torch", "plain pickle"])
@pytest.mark.parametrize("name", PARTS)
def test_an_armed_part_of_a_trainers_checkpoint_never_fires(
    trained: tuple[Trainer, Path], arm: Arm, name: str, wrapped: bool
) -> None:
    trainer, folder = trained
    expected = name != "pytorch_model.bin"
    assert (folder / name).exists() is expected
    if not expected:
        (folder / "model.safetensors").unlink()
    mark = arm(folder / name, wrapped)
    if name == "training_args.bin":
        PARTS[name](trainer, str(folder))  # it is never read
    else:
        with pytest.raises(Exception, match=r"[Ww]eights.only"):
            PARTS[name](trainer, str(folder))
    assert not mark.exists()


@pytest.mark.parametrize("wrapped", [True, False], ids=["torch", "plain pickle"])
def test_an_armed_checkpoint_of_ppo_never_fires(tmp_path: Path, arm: Arm, wrapped: bool) -> None:
    (tmp_path / "state").mkdir()
    path = tmp_path / "state" / "checkpoint-00000001.pt"
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
