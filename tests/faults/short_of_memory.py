"""What test_memory.py starts as two processes: the gradient of a minibatch, computed whole and with one process short
of memory, and a text whose loss is NaN in one process only."""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlhf_core.errors import NonFiniteError
from rlhf_core.ppo.ptx import TextMix
from rlhf_core.ppo.trainer import PPOTrainer

TINY = runpy.run_path(str(Path(__file__).parents[1] / "rlhf_core" / "conftest.py"))
TEXT = {"text": [[3, 9, 4, 20, 21], [30, 31, 32]], "ptx": {"coef": 1.0, "batch_size": 4}}


def gradient(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    """Of the first minibatch, the processes' parts added up."""
    rollout = trainer.rollout()
    credit = trainer.assign_credit(rollout, trainer.score(rollout))
    updater, plan = trainer.updater, trainer.plan()
    updater._gradient(rollout, credit, updater._minibatches(rollout, plan, 0)[0], plan, 0)
    for parameters in trainer.models.trained().values():
        updater._all_reduce_gradients(parameters)
    modules: dict[str, Any] = {"policy": trainer.models.policy, "critic": trainer.models.critic}
    return {f"{part}.{n}": p.grad for part, m in modules.items() for n, p in m.named_parameters() if p.grad is not None}


def main(folder: Path) -> None:
    """Write whole.pt and short.pt; print what each process has."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"batch_size": 16, "micro_batch_size": 2, **TEXT}
    whole, short, broken = (TINY["tiny_trainer"](**options) for _ in range(3))
    second = whole.processes.accelerator.process_index == 1

    def refuse(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        rows = len(inputs["packed"].nodes if "packed" in inputs else inputs["input_ids"])
        if second and torch.is_grad_enabled() and rows > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    short.models.policy.register_forward_pre_hook(refuse, with_kwargs=True)
    found = {"whole": gradient(whole), "short": gradient(short)}
    print("halved", short.halved, flush=True)
    if not second:
        for name, gradients in found.items():
            torch.save(gradients, folder / f"{name}.pt")
    rollout = broken.rollout()
    credit = broken.assign_credit(rollout, broken.score(rollout))
    losses = TextMix.losses

    def corrupt(*arguments: Any) -> Iterator[torch.Tensor]:
        yield from (loss * (float("nan") if second else 1.0) for loss in losses(*arguments))

    TextMix.losses = corrupt  # type: ignore[method-assign]
    try:
        broken.updater.run(rollout, credit, broken.plan())
    except NonFiniteError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
