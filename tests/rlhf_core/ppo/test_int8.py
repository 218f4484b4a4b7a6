"""Adam with 8-bit states: refused in one line without bitsandbytes, a quarter of the memory with it."""

import copy
import sys
from collections.abc import Callable

import pytest
import torch

from rlhf_core.errors import UserError
from rlhf_core.ppo.int8 import adam_8bit
from rlhf_core.ppo.optimizers import build_optimizers
from rlhf_core.ppo.trainer import PPOTrainer


def test_without_bitsandbytes_the_pip_command_is_given(
    make_trainer: Callable[..., PPOTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UserError, match=r"ppo.optimizer.states: int8 needs bitsandbytes: pip install 'bitsandbytes"
    ) as refusal:
        make_trainer(optimizer={"states": "int8"})
    assert "\n" not in str(refusal.value)


@pytest.mark.quantize
def test_moments_take_a_quarter_of_the_memory_and_steps_are_nearly_those_of_adam() -> None:
    torch.manual_seed(1)
    start, gradient = torch.randn(128, 128), torch.randn(128, 128)
    exact, small = (torch.nn.Parameter(start.clone()) for _ in range(2))
    adams = (torch.optim.Adam([exact], lr=1e-2), adam_8bit([small], 1e-2, (0.9, 0.999), 1e-8))
    for _ in range(5):
        exact.grad, small.grad = gradient.clone(), gradient.clone()
        for adam in adams:
            adam.step()
    assert not torch.equal(exact, small)
    assert (exact - small).abs().mean() < 0.1 * (exact - start).abs().mean()
    sizes = [sum(t.nbytes for t in adam.state_dict()["state"][0].values() if torch.is_tensor(t)) for adam in adams]
    assert sizes[1] < 0.3 * sizes[0]


@pytest.mark.quantize
def test_ppo_continues_from_its_checkpoint_to_the_bit(make_trainer: Callable[..., PPOTrainer]) -> None:
    whole, first, second = (make_trainer(optimizer={"states": "int8"}) for _ in range(3))
    whole.step()
    first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.step() == whole.step()
    kinds = {type(optimizer).__name__ for optimizer in build_optimizers(whole.models.trained(), whole.config).values()}
    assert kinds == {"Adam8bit"}
