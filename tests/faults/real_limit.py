"""What test_memory.py starts in a process of its own: one minibatch of PPO under a limit of the address space that ends
between what half a micro-batch needs and what a whole one needs."""

import resource
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.training import memory

ROWS = 64


def peak() -> int:
    """The largest address space so far, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak"))


def build() -> PPOTrainer:
    """A tiny trainer with a vocabulary so wide that its logits are most of what a pass holds."""
    tiny = runpy.run_path(str(Path(__file__).parents[1] / "rlhf_core" / "conftest.py"))
    build_models = tiny["tiny_lm"]
    build_models.__globals__["VOCABULARY"] = 12_000
    trainer: PPOTrainer = tiny["tiny_trainer"](batch_size=ROWS, minibatches=1, micro_batch_size=4, max_new_tokens=24)
    return trainer


def gradient(trainer: PPOTrainer, experience: Any, micro: int) -> torch.Tensor:
    """Of the one minibatch of the step."""
    rollout, credit = experience
    updater = replace(trainer.updater, config=trainer.config.model_copy(update={"micro_batch_size": micro}))
    updater._drop_gradients()
    updater._gradient(rollout, credit, range(ROWS), trainer.plan(), 1)
    return torch.cat([p.grad.flatten() for p in trainer.models.policy.parameters() if p.grad is not None])


def main() -> None:
    """Measure, limit, do it again; exit 1 when something is wrong."""
    torch.set_num_threads(1)
    trainer = build()
    rollout = trainer.rollout()
    experience = rollout, trainer.assign_credit(rollout, trainer.score(rollout))
    peaks = []
    for micro in (ROWS // 2, ROWS):
        whole = gradient(trainer, experience, micro)
        peaks.append(peak())
    print("peaks", *(size >> 20 for size in peaks), "MiB")
    if peaks[1] - peaks[0] < 16 << 20:
        print("the need of a micro-batch cannot be measured with this allocator")
        return
    met: list[str] = []
    recognise = memory.is_out_of_memory

    def noted(error: BaseException) -> bool:
        met.append(str(error))
        return recognise(error)

    memory.is_out_of_memory = noted
    printed: list[str] = []
    trainer.exempt = printed.append
    resource.setrlimit(resource.RLIMIT_AS, (sum(peaks) // 2,) * 2)
    found = gradient(trainer, experience, ROWS)
    print("refused:", *("can't allocate memory" if "can't allocate memory" in text else text for text in met))
    assert trainer.halved
    assert len(printed) == 1, printed
    gap = ((found - whole).norm() / whole.norm()).item()
    print("gap", gap)
    assert gap <= 1e-5, gap


if __name__ == "__main__":
    sys.exit(main())
