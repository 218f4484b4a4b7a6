"""What test_processes.py starts in one or two processes: three PPO steps of the tiny trainer; the main process saves
the first gradient, the parameters after each step, the rows, and the sampled ids."""

import errno
import json
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest

from rlhf_core.errors import UserError
from rlhf_core.models import sharded_files, sharding
from rlhf_core.models.batch import pad_batch, predict, sequence_scores
from rlhf_core.models.precision import autocast, keep_float32
from rlhf_core.models.token_logprobs import logprobs_and_entropy
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.training import state as checkpoint
from rlhf_core.training.checkpoints import Checkpoints
from rlhf_core.training.processes import Processes


def main(folder: Path, options: dict[str, Any]) -> None:
    """Train, and write `run.pt`."""
    torch.set_num_threads(1)
    steps, dies = options.pop("steps", 3), options.pop("die", False)
    saves = "state" in options
    checkpoints = Checkpoints(Path(options.pop("state", folder / "state")))
    if options.get("checks_bfloat16"):
        require_bfloat16_as_whole()
        return
    checks_saving = options.pop("checks_saving", False)
    trainer = conftest.tiny_trainer(**options)
    if checks_saving:
        require_plain_errors(trainer, folder)
        return
    if dies and not trainer.processes.is_main:
        die_while_saving(trainer)
    if options.get("sharding") == "fsdp" and trainer.processes.divides_models:
        require_refusal_to_move(trainer)
    state = checkpoint.load(checkpoints, trainer.processes)
    if state is not None:
        trainer.load_state_dict(state)
    gradients = record_gradients(trainer)
    rows, weights, sampled = [], [], []
    while trainer.steps_done < steps:
        sampled.append(trainer.rollout().response_ids)
        rows.append(trainer.step())
        weights.append(flat([p for part in trainer.models.trained().values() for p in part]))
        if saves and trainer.writes:
            checkpoint.save(checkpoints, trainer.steps_done, trainer.state_dict(), trainer.processes)
    memory = {name: own_bytes(part) for name, part in trainer.models.trained().items()}
    memory["optimizers"] = sum(own_bytes(o.state[p].values()) for o in trainer.optimizers.values() for p in o.state)
    trainer.models.rejoin()
    if trainer.processes.is_main:
        policy = trainer.models.finished_policy()
        saved = torch.cat([p.detach().flatten() for p in policy.parameters()])
        run = {
            "gradient": gradients[0],
            "weights": weights,
            "rows": rows,
            "sampled": sampled,
            "memory": memory,
            "saved": saved,
        }
        torch.save(run | {"processes": trainer.processes.count}, folder / "run.pt")


def record_gradients(trainer: PPOTrainer) -> list[torch.Tensor]:
    """The whole gradient at every optimiser step, after the processes' parts were added up and clipped."""
    seen: list[torch.Tensor] = []
    drop = trainer._drop_gradients

    def record() -> None:
        parts = [p.grad for trained in trainer.models.trained().values() for p in trained if p.grad is not None]
        if parts:
            seen.append(flat(parts))
        drop()

    trainer._drop_gradients = record  # type: ignore[method-assign]
    return seen


@torch.no_grad()
def require_bfloat16_as_whole() -> None:
    """Frozen models with bfloat16 weights, divided: in a pass and as whole ones they compute what they did before, up
    to the rounding of bfloat16."""
    device = torch.device("cpu")
    batch = pad_batch([[3, 5, 4], [3, 9, 8, 7]], [[10, 11, 12, 1], [13, 1]], 0, device)
    Processes("fsdp")

    def chosen(model: Any) -> torch.Tensor:
        return logprobs_and_entropy(predict(model, batch), batch.response_tokens)[0]

    def scores(model: Any) -> torch.Tensor:
        return sequence_scores(model, batch)

    language, scalar = conftest.tiny_lm(), conftest.tiny_scalar()
    for model, head, read in ((language, language.lm_head, chosen), (scalar, scalar.score, scores)):
        weight = head.weight.data.clone()
        model.requires_grad_(False).to(torch.bfloat16)
        if model is scalar:
            head.to(torch.float32).weight.copy_(weight)
        else:
            keep_float32(head)
        with autocast("bfloat16", device):
            before = read(model)
            sharding.divide(model, bfloat16=True)
            found = [sharding.within(model, partial(read, model))]
            with sharding.whole([model]):
                found.append(read(model))
        assert next(model.parameters()).dtype == torch.bfloat16
        for after in found:
            assert torch.allclose(before, after, rtol=1e-2, atol=1e-2), (before, after)


def require_plain_errors(trainer: PPOTrainer, folder: Path) -> None:
    """In both processes: an OSError for a disk that is full in one, a UserError for a file that the main one misses."""
    state, write, count = trainer.models.state_dict(), HuggingFaceStorageWriter.write_data, sharded_files.count

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if not trainer.processes.is_main:
        HuggingFaceStorageWriter.write_data = full
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        sharded_files.save(folder / "full.pt", state)
    HuggingFaceStorageWriter.write_data = write
    sharded_files.count = lambda place: count(place) - 1
    with pytest.raises(UserError, match="files of 2 processes are there"):
        sharded_files.save(folder / "missing.pt", state)
    assert not (folder / "missing.pt").exists()


def require_refusal_to_move(trainer: PPOTrainer) -> None:
    """A divided model refuses to be moved or cast, also to where it is."""
    for change in (lambda model: model.to(model.device), lambda model: model.bfloat16()):
        with pytest.raises(RuntimeError, match="divided model cannot be moved"):
            change(trainer.models.policy)


def die_while_saving(trainer: PPOTrainer) -> None:
    """A kill of this process while the others write their parts of the second checkpoint."""
    write = sharded_files.write

    def die_or_write(folder: Path, tensors: dict[str, DTensor]) -> None:
        if trainer.steps_done == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        write(folder, tensors)

    sharded_files.write = die_or_write


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors as one vector, gathered from all processes where they are divided."""
    whole = sharding.gathered({str(place): tensor for place, tensor in enumerate(tensors)})
    return torch.cat([tensor.flatten() for tensor in whole.values()])


def own_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this process' parts."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
