"""What test_processes.py starts with `accelerate launch`: three PPO steps of the tiny trainer; the main process saves
the first gradient, the parameters after each step, the rows, and the sampled ids."""

import json
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest

from rlhf_core.models import sharded_files, sharding
from rlhf_core.ppo import checkpoint
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.training.checkpoints import Checkpoints


def main(folder: Path, options: dict[str, Any]) -> None:
    """Train, and write `run.pt`."""
    torch.set_num_threads(1)
    fails, steps, dies = options.pop("fail_in_layer", None), options.pop("steps", 3), options.pop("die", False)
    saves = "state" in options
    checkpoints = Checkpoints(Path(options.pop("state", folder / "state")))
    trainer = conftest.tiny_trainer(**options)
    if fails is not None and not trainer.processes.is_main:
        run_out_of_memory(trainer, fails)
    if dies and not trainer.processes.is_main:
        die_while_saving(trainer)
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
            "halved": trainer.halved,
            "saved": saved,
        }
        torch.save(run | {"processes": trainer.processes.count}, folder / "run.pt")


def record_gradients(trainer: PPOTrainer) -> list[torch.Tensor]:
    """The whole gradient at every optimiser step, after the processes' parts were added up and clipped."""
    seen: list[torch.Tensor] = []
    drop = trainer.updater._drop_gradients

    def record() -> None:
        parts = [p.grad for trained in trainer.models.trained().values() for p in trained if p.grad is not None]
        if parts:
            seen.append(flat(parts))
        drop()

    trainer.updater._drop_gradients = record  # type: ignore[method-assign]
    return seen


def run_out_of_memory(trainer: PPOTrainer, place: int) -> None:
    """Once, in the third training pass of this process: in a layer of the policy, or in its output layer (-1)."""
    layers, passes = trainer.models.policy.model.layers, iter(range(10**6))
    module = trainer.models.policy.lm_head if place < 0 else layers[place]

    def fail(*_: Any) -> None:
        if torch.is_grad_enabled() and next(passes) == 2:
            raise RuntimeError("not enough memory: you tried to allocate 8 bytes")

    module.register_forward_pre_hook(fail)


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
