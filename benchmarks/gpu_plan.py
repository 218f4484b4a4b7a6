"""Planned peak memory of the checks of `gpu_check.py`."""

from typing import Any

from gpu_check import Case
from gpu_trainer import GPU_WORK, TOY, TOY_WORK, config_of, precision_of, values_of

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.planning import Lengths, Model, ppo_phases


def planned_bytes(case: Case, gpu: bool) -> int:
    """Bytes at the peak of a PPO step after the first, with the longest rows. Raises UserError for settings that the
    planner does not support."""
    work, precision = GPU_WORK if gpu else TOY_WORK, precision_of(case)
    sizes: dict[str, Any] = {} if gpu else TOY
    policy = config_of(case.model, **sizes)
    model = Model.of(policy, precision=precision, accelerator=gpu)
    config = PPOConfig.model_validate(values_of(case, work))
    lengths = Lengths(work.prompt, work.response)
    if not case.reward:
        return max(phase.peak for phase in ppo_phases(model, config, lengths, scorers=1))
    other = Model.of(config_of(case.reward, **sizes | {"vocab_size": policy.vocab_size}), precision=precision)
    phases = ppo_phases(model, config, lengths, scorers=0)
    return max(phase.peak for phase in phases) + other.size(None, frozen=True) * other.scalar
