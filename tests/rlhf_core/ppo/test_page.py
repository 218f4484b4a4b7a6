"""A PPO step can be read: few frames to the model, and it calls the functions that are documented and tested."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from rlhf_core.ppo.trainer import PPOTrainer

MakeTrainer = Callable[..., PPOTrainer]
PACKAGE = str(Path(inspect.getfile(PPOTrainer)).parents[1])
MOST_FRAMES = 8
MOST_LINES = 120


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"critic": {"kind": "shared"}},
        {"lora": {"rank": 2, "alpha": 4.0}},
        {"kl": {"penalty": "loss", "estimator": "k2"}},
    ],
    ids=["separate critic", "shared critic", "lora", "kl in the loss"],
)
def test_few_of_our_frames_are_between_a_step_and_the_model(make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
    """In passes of policy, reference and critic; the engine that samples has its own."""
    trainer, depths = make_trainer(**options), set()

    def count(*_: Any) -> None:
        own = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not PPOTrainer.step.__code__:
            if frame.f_code.co_filename.startswith(PACKAGE):
                own.append(f"{frame.f_code.co_filename[len(PACKAGE) :]}:{frame.f_code.co_name}")
            frame = frame.f_back
        if frame is not None and not any("sampling" in name for name in own):
            depths.add((len(own), *own))

    trainer.step()  # decides how each model is read
    models = trainer.models
    for model in (models.policy, models.reference, models.critic):
        if model is not None:
            getattr(model, model.base_model_prefix).register_forward_pre_hook(count)
    trainer.step()
    assert depths
    assert max(depths)[0] <= MOST_FRAMES, max(depths)


def test_a_step_is_one_page() -> None:
    assert len(inspect.getsource(PPOTrainer.step).splitlines()) <= MOST_LINES


def test_a_step_calls_the_functions_of_the_seeds(make_trainer: MakeTrainer) -> None:
    called = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.add(frame.f_code.co_name)

    trainer = make_trainer()
    sys.setprofile(note)
    try:
        trainer.step()
    finally:
        sys.setprofile(None)
    torch.set_grad_enabled(True)
    assert called >= {
        *("compute_gae", "whiten", "compute_ppo_loss", "compute_value_loss", "compute_entropy"),
        *("compute_ppo_total_loss", "estimate_kl", "shape_rewards", "normalise_scores", "update"),
    }
