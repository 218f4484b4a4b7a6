"""Parts of a PPO step for tests: the credit of a rollout, and the update with a rollout or credit of the test's own."""

from typing import Any

import pytest
import torch

from rlhf_core.ppo import trainer as trainer_module
from rlhf_core.ppo.credit import assign_credit
from rlhf_core.ppo.plan import StepPlan
from rlhf_core.ppo.rollout import Credit, Rollout
from rlhf_core.ppo.trainer import PPOTrainer, Row


def credit_of(trainer: PPOTrainer, rollout: Rollout) -> Credit:
    """As the next step assigns it."""
    return assign_credit(rollout, trainer.score(rollout), trainer.config, trainer.controller.coef)


def passes(trainer: PPOTrainer, rollout: Rollout, epoch: int = 0) -> list[list[list[int]]]:
    """The micro-batches of each minibatch of an epoch of the next step."""
    plan = StepPlan.of(trainer.config, trainer.steps_done)
    rows = list(trainer._minibatches(rollout, plan))
    return [
        trainer.micro_batches(rollout, minibatch, plan)
        for minibatch in rows[epoch * plan.minibatches : (epoch + 1) * plan.minibatches]
    ]


def update(
    trainer: PPOTrainer, rollout: Rollout, credit: Credit | None = None, watch: Any = None, **config: Any
) -> Row:
    """The next step with this rollout and credit, and with changed settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "config", trainer.config.model_copy(update=config))
        if credit is not None:
            patch.setattr(trainer_module, "assign_credit", lambda *_: credit)
        return trainer.step(rollout, watch)


class _Stop(Exception):
    pass


def first_gradients(trainer: PPOTrainer, rollout: Rollout, credit: Credit, **config: Any) -> dict[str, torch.Tensor]:
    """The gradients of policy and critic in the first minibatch, before they are clipped."""
    found: dict[str, torch.Tensor] = {}
    trainer._drop_gradients()

    def stop(*_: Any) -> None:
        for name, parameters in trainer.models.trained().items():
            parts = [p.grad.flatten() for p in parameters if p.grad is not None]
            found[name] = torch.cat(parts) if parts else torch.zeros(0)
        trainer._drop_gradients()
        raise _Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_step_optimizers", stop)
        with pytest.raises(_Stop):
            update(trainer, rollout, credit, **{"check_ratio": False, **config})
    return found
