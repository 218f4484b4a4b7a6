"""Out of memory in SFT, reward model and pair training: the run stops with one line that names the key to lower. The
tests use an allocator that fails at a given place."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.config.dpo import DPOConfig
from rlhf_core.config.reward import RewardConfig
from rlhf_core.config.sft import SFTConfig
from rlhf_core.dpo import dpo_objective, reference_logprobs, train_on_pairs
from rlhf_core.errors import UserError, is_out_of_memory
from rlhf_core.reward import Comparison, train_reward_model
from rlhf_core.sft import Demonstration, fine_tune
from rlhf_core.training import loop
from rlhf_core.training.run import Run

TINY: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "rlhf_core" / "conftest.py")))
REFUSED = "CUDA out of memory. Tried to allocate 2.00 GiB."
Gradients = list[dict[str, Tensor]]


class Shortage:
    """Memory for training passes over `fits` rows. Larger ones fail, the first `after` of them excepted: before the
    pass, or half-way back through it, when the later layers have their gradients already."""

    def __init__(self, model: Any, fits: int, after: int = 0, where: str = "forward") -> None:
        self.fits, self.after, self.where = fits, after, where
        self.rows: list[int] = []
        body: nn.Module = getattr(model, model.base_model_prefix)
        body.register_forward_pre_hook(self._forward, with_kwargs=True)
        early = next(p for name, p in model.named_parameters() if "layers.0." in name)
        early.register_hook(self._backward)

    def _forward(self, _: nn.Module, __: Any, inputs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.rows.append(len(inputs["packed"].nodes if "packed" in inputs else inputs["input_ids"]))
            if self.where == "forward":
                self._allocate()

    def _backward(self, _: Tensor) -> None:
        if self.where == "backward":
            self._allocate()

    def _allocate(self) -> None:
        if self.rows[-1] > self.fits:
            self.after -= 1
            if self.after < 0:
                raise torch.OutOfMemoryError(REFUSED)


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To 1e-5 of the norm of each parameter's gradient."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


SFT = SFTConfig(
    learning_rate=1e-3,
    epochs=1,
    batch_size=8,
    micro_batch_size=4,
    warmup_steps=0,
    weight_decay=0.0,
    max_tokens=64,
    evaluate_every=100,
    patience=0,
)
ROWS = [Demonstration([3, 5 + i % 4, 4], [*range(10, 11 + i % 7), 1]) for i in range(16)]
REWARD = RewardConfig(learning_rate=1e-3, epochs=1, batch_size=4, warmup_steps=0, weight_decay=0.0, max_tokens=64)
DPO = DPOConfig(enabled=True, learning_rate=1e-3, epochs=1, batch_size=4, warmup_steps=0, max_tokens=64)
COMPARISONS = [
    Comparison(
        [3, 5 + i % 5, 4],
        [[30, 10 + i, 1], [11 + i, 12], [13 + i, 30, 14, 15, 1], [20 + i % 3, 1]][: 2 + i % 3],
        [(0, 1), (2, 1), (2, 3), (0, 3)][: 1 + i % 3],
    )
    for i in range(12)
]
Train = Callable[[nn.Module, Run], list[dict[str, float]]]


def sft(model: Any, run: Run) -> list[dict[str, float]]:
    return fine_tune(model, ROWS, ROWS[:2], SFT, 0, run).log


def reward(model: Any, run: Run) -> list[dict[str, float]]:
    return train_reward_model(model, COMPARISONS, REWARD, 0, run)


def dpo(model: Any, run: Run) -> list[dict[str, float]]:
    """Against another model than the one it starts from: margins of 0 would be ordered by rounding."""
    references = reference_logprobs(TINY.tiny_lm(seed=7), COMPARISONS, 0)
    return train_on_pairs(model, COMPARISONS, references, DPO, dpo_objective(DPO), 0, run, "dpo")


STAGES: dict[str, tuple[Train, Callable[..., Any]]] = {
    "sft": (sft, TINY.tiny_lm),
    "reward": (reward, TINY.tiny_scalar),
    "dpo": (dpo, TINY.tiny_lm),
}
KEYS = {"sft": "sft.micro_batch_size", "reward": "reward.micro_batch_tokens", "dpo": "dpo.micro_batch_tokens"}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", list(STAGES))
def test_a_training_without_memory_names_the_key_to_lower_and_continues(stage: str, where: str, tmp_path: Path) -> None:
    """The third pass is refused. The same command, with memory, ends in the bytes of an uninterrupted run."""
    train, build = STAGES[stage]
    whole, short, again = build(), build(), build(seed=9)
    log = train(whole, Run(tmp_path / "whole", seed=3, report=lambda *_: None))
    run = Run(tmp_path / "short", seed=3, report=lambda *_: None, checkpoint_every=1)
    Shortage(short, fits=0, after=2, where=where)
    with pytest.raises(
        UserError, match=rf"^out of memory at step \d; lower {KEYS[stage]}.*continues at step \d$"
    ) as stopped:
        train(short, run)
    assert "\n" not in str(stopped.value)
    assert train(again, run) == log
    assert all(torch.equal(one, two) for one, two in zip(again.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("stage", ["reward", "dpo"])
def test_rule_13_micro_batches_of_pairs_have_the_gradient_of_the_batch(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt a pass, or all: the first step to 1e-5, with prompts of other numbers of pairs."""
    (train, build), clip, found = STAGES[stage], loop.clip_gradients, {}
    seen: Gradients = []

    def noted(parameters: list[nn.Parameter], norm: float) -> float:
        seen.append({str(number): p.grad.clone() for number, p in enumerate(parameters) if p.grad is not None})
        return clip(parameters, norm)

    monkeypatch.setattr(loop, "clip_gradients", noted)
    for tokens in (1, 8192):
        for name, settings in (("REWARD", REWARD), ("DPO", DPO)):
            monkeypatch.setitem(globals(), name, settings.model_copy(update={"micro_batch_tokens": tokens}))
        model, start = build(), len(seen)
        passes = Shortage(model, fits=10**6)
        log = train(model, Run(tmp_path / str(tokens), seed=3, report=lambda *_: None))
        found[tokens] = seen[start], log[0], len(passes.rows)
    require_equal(found[1][0], found[8192][0])
    assert (found[1][2], found[8192][2]) == (12, 3)
    for name in ("loss", "accuracy", "grad_norm"):
        assert found[1][1][name] == pytest.approx(found[8192][1][name], rel=1e-4)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError(REFUSED), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you t"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) == memory
