"""Out of memory: a batch that does not fit is halved once for the rest of the run, with the same gradient, or the run
stops with one line. Most tests use an allocator that fails at a given place, one a real limit."""

import contextlib
import runpy
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from rlhf_core.training.memory import Halving, OutOfMemory, attempt
from rlhf_core.training.run import Run
from rlhf_core.training.trainer import GuardedTrainer

TINY: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "rlhf_core" / "conftest.py")))
ROOT = str(Path(__file__).parents[2])
REFUSED = "CUDA out of memory. Tried to allocate 2.00 GiB."
Gradients = list[dict[str, Tensor]]


class Shortage:
    """Memory for training passes over `fits` rows. Larger ones fail, the first `after` of them excepted: before the
    pass, or half-way back through it, when the later layers have their gradients already."""

    def __init__(self, model: Any, fits: int, after: int = 0, where: str = "forward") -> None:
        self.fits, self.after, self.where = fits, after, where
        self.rows: list[int] = []
        self.refused = 0
        self.since: list[int] = []
        """The rows of the passes after the last refusal."""
        body: nn.Module = getattr(model, model.base_model_prefix)
        body.register_forward_pre_hook(self._forward, with_kwargs=True)
        early = next(p for name, p in model.named_parameters() if "layers.0." in name)
        early.register_hook(self._backward)

    def _forward(self, _: nn.Module, __: Any, inputs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.rows.append(len(inputs["packed"].nodes if "packed" in inputs else inputs["input_ids"]))
            self.since.append(self.rows[-1])
            if self.where == "forward":
                self._allocate()

    def _backward(self, _: Tensor) -> None:
        if self.where == "backward":
            self._allocate()

    def _allocate(self) -> None:
        if self.rows[-1] > self.fits:
            self.after -= 1
            if self.after < 0:
                self.refused += 1
                self.since = []
                raise torch.OutOfMemoryError(REFUSED)


def snapshot(modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": p.grad.clone()
        for part, module in modules.items()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


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
STAGE_FITS = {"sft": 2, "reward": 8, "dpo": 8}
"""Rows. A step of SFT has two micro-batches of 4 rows; one of the reward model and of DPO 4 prompts with 9 to 15
responses in one, at most 8 of them to two prompts."""


@dataclass
class Outcome:
    """What a training left, and the gradients of each of its steps before they were clipped."""

    log: list[dict[str, float]]
    printed: list[str]
    gradients: Gradients
    weights: list[Tensor]
    shortage: Shortage | None


TrainStage = Callable[..., Outcome]


@pytest.fixture
def train_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainStage:
    """train_stage("sft", "folder", fits=2, after=0, where="forward", kill=0, save=99) -> the training of a stage, short
    of memory where `fits` is given, interrupted after step `kill`, with a checkpoint every `save` steps."""
    check = GuardedTrainer.check_gradients

    def train(
        stage: str, folder: str, fits: int | None = None, kill: int = 0, save: int = 99, **shortage: Any
    ) -> Outcome:
        work, build = STAGES[stage]
        model = build()
        outcome = Outcome([], [], [], list(model.parameters()), Shortage(model, fits, **shortage) if fits else None)

        def noted(trainer: Any, model: Any) -> None:
            outcome.gradients.append(snapshot({"model": model}))
            check(trainer, model)

        def report(step: int, total: int, values: dict[str, float]) -> None:
            if step == kill and "loss" in values:
                raise KeyboardInterrupt

        monkeypatch.setattr(GuardedTrainer, "check_gradients", noted)
        run = Run(tmp_path / folder, seed=3, report=report, checkpoint_every=save, exempt=outcome.printed.append)
        with contextlib.suppress(KeyboardInterrupt):
            outcome.log = work(model, run)
        return outcome

    return train


@pytest.mark.slow
@pytest.mark.chosen("sft-3-1-backward", "reward-1-1-forward", "dpo-0-0-backward")
@pytest.mark.parametrize(
    ("stage", "after", "step", "where"),
    [
        ("sft", 0, 0, "forward"),
        ("sft", 1, 0, "backward"),
        ("sft", 3, 1, "backward"),
        ("reward", 0, 0, "backward"),
        ("reward", 1, 1, "forward"),
        ("dpo", 0, 0, "backward"),
        ("dpo", 1, 1, "forward"),
    ],
)
def test_a_training_step_halves_a_micro_batch_that_does_not_fit(
    stage: str, after: int, step: int, where: str, train_stage: TrainStage
) -> None:
    """In the first or second micro-batch of a step: the gradient of that step to 1e-5, and all numbers of the log."""
    fits = STAGE_FITS[stage]
    whole, short = train_stage(stage, "whole"), train_stage(stage, "short", fits, after=after, where=where)
    assert short.shortage is not None
    assert short.shortage.refused == 1
    assert len(short.printed) == 1
    assert "exempt from byte identity" in short.printed[0]
    assert whole.printed == []
    for before, same in zip(short.gradients[:step], whole.gradients[:step], strict=True):
        assert all(torch.equal(before[name], same[name]) for name in same)
    require_equal(short.gradients[step], whole.gradients[step])
    assert len(short.gradients) == len(whole.gradients)
    assert max(short.shortage.since) <= fits
    for found, expected in zip(short.log, whole.log, strict=True):
        for name in {"loss", "accuracy", "margin", "eval_loss"} & expected.keys():
            assert found[name] == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.slow
@pytest.mark.chosen("reward")
@pytest.mark.parametrize("stage", list(STAGES))
def test_a_training_that_continues_takes_halves_from_the_start(stage: str, train_stage: TrainStage) -> None:
    fits = STAGE_FITS[stage]
    whole = train_stage(stage, "whole", fits)
    train_stage(stage, "cut", fits, kill=2, save=1)
    rest = train_stage(stage, "cut", fits)
    assert rest.shortage is not None
    assert rest.shortage.refused == 0
    assert len(rest.printed) == 1
    assert "exempt from byte identity" in rest.printed[0]
    assert all(torch.equal(one, two) for one, two in zip(rest.weights, whole.weights, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "key", "where"),
    [
        ("sft", "sft.micro_batch_size", "backward"),
        ("reward", "reward.max_tokens", "forward"),
        ("dpo", "dpo.batch_size", "backward"),
    ],
)
def test_a_training_stops_where_halves_do_not_fit(stage: str, key: str, where: str, train_stage: TrainStage) -> None:
    with pytest.raises(UserError, match=key) as stopped:
        train_stage(stage, "short", fits=1, where=where)
    assert "\n" not in str(stopped.value)


def test_a_loss_that_is_a_mean_over_a_micro_batch_is_weighed_by_tokens(
    train_stage: TrainStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that takes no `num_items_in_batch`: its halves have other numbers of tokens."""
    monkeypatch.setattr(GuardedTrainer, "_get_num_items_in_batch", lambda *_: None)
    whole, short = train_stage("sft", "whole"), train_stage("sft", "short", fits=2, after=1)
    require_equal(short.gradients[0], whole.gradients[0])


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

    def work() -> None:
        raise error

    with pytest.raises(OutOfMemory if memory else type(error)) as raised:
        attempt(work, lambda: 3)
    assert raised.value.__context__ is None, "it would hold the failed pass"


def test_a_failed_pass_is_freed_before_the_next() -> None:
    """Neither the error nor its frames hold what the pass had made."""
    held: list[weakref.ref[Tensor]] = []

    def work() -> int:
        activations = torch.ones(10)
        assert all(made() is None for made in held)
        held.append(weakref.ref(activations))
        if len(held) == 1:
            raise torch.OutOfMemoryError(REFUSED)
        return 7

    halving = Halving("a phase", "keys", lambda _: None)
    assert halving.until_it_fits(lambda: attempt(work, lambda: 4)) == 7
    assert halving.of(5) == 3


def test_processes_may_mark_the_halving_at_the_same_time(tmp_path: Path) -> None:
    """Where a model is divided all of them halve, with one state folder."""
    with ThreadPoolExecutor(8) as pool:
        for round_ in range(5):
            halvings = [Halving("a phase", "keys", lambda _: None, tmp_path / f"{round_}/halved") for _ in range(8)]
            list(pool.map(lambda halving: halving.halve(4), halvings))
            assert (tmp_path / f"{round_}/halved").exists()
