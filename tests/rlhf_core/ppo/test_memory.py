"""Out of memory in a PPO step: one line that names the phase, the step and the keys to lower; no step is made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_core.ppo.trainer import KEYS, OutOfMemory, PPOTrainer

MakeTrainer = Callable[..., PPOTrainer]


def refuse(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("phase", ["rollout", "scoring", "update"])
def test_out_of_memory_names_the_step_and_the_keys_to_lower(make_trainer: MakeTrainer, phase: str) -> None:
    trainer = make_trainer()
    trainer.step()
    before = [p.detach().clone() for p in trainer.models.policy.parameters()]
    if phase == "rollout":
        trainer.engine = refuse
    elif phase == "scoring":
        trainer.scoring.source.scorer = refuse
    else:
        next(trainer.models.policy.parameters()).register_hook(refuse)
    with pytest.raises(OutOfMemory) as error:
        trainer.step()
    assert str(error.value) == f"out of memory in the {phase} of step 2; lower {KEYS[phase]}"
    assert trainer.steps_done == 1
    assert all(torch.equal(p, old) for p, old in zip(trainer.models.policy.parameters(), before, strict=True))


def test_another_error_of_the_runtime_stays_what_it_is(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()

    def fail(*_: Any) -> None:
        raise RuntimeError("shapes differ")

    trainer.engine = fail
    with pytest.raises(RuntimeError, match="shapes differ"):
        trainer.step()
