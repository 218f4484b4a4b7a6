"""Out of memory: a batch that does not fit is halved once for the rest of the run, with the same gradient, or the run
stops with one line. Most tests use an allocator that fails at a given place, one a real limit."""

import copy
import os
import runpy
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from rlhf_core.ppo import update
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.reward import Comparison, train_reward_model
from rlhf_core.sft import Demonstration, fine_tune
from rlhf_core.training import loop
from rlhf_core.training.memory import Halving, OutOfMemory, attempt
from rlhf_core.training.run import Run

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


PPO: dict[str, Any] = {
    "batch_size": 16,
    "micro_batch_size": 4,
    "optimizer": {"max_grad_norm": 1e9},
    "text": [[3, 9, 4, 20, 21], [30, 31, 32], [40, 12, 10, 10, 8, 7]],
    "ptx": {"coef": 1.0, "batch_size": 4, "tokens": 6},
}
"""Each minibatch: two micro-batches of four responses, then one of four pieces of text. Two epochs of two."""


def ppo(**changes: Any) -> tuple[PPOTrainer, list[str], Gradients]:
    """A trainer, its messages about memory, and the gradients that its optimiser receives."""
    trainer: PPOTrainer = TINY.tiny_trainer(**(PPO | changes))
    printed: list[str] = []
    gradients: Gradients = []
    trainer.exempt = printed.append
    modules = {"policy": trainer.models.policy, "critic": trainer.models.critic}
    trainer.optimizers["policy"].register_step_pre_hook(lambda *_: gradients.append(snapshot(modules)))
    return trainer, printed, gradients


@pytest.mark.parametrize(
    ("after", "minibatch", "where"),
    [
        pytest.param(0, 0, "forward", id="the first pass"),
        pytest.param(0, 0, "backward", id="the first pass, half-way back"),
        pytest.param(1, 0, "backward", id="the second micro-batch"),
        pytest.param(2, 0, "backward", id="the text"),
        pytest.param(4, 1, "forward", id="the second minibatch"),
        pytest.param(7, 2, "backward", id="the second epoch"),
    ],
)
def test_ppo_halves_a_micro_batch_that_does_not_fit(after: int, minibatch: int, where: str) -> None:
    """Refused at a micro-batch of the first, second or third minibatch: the gradients before it are the same bytes, its
    own to 1e-5, and from then on no pass is larger than half."""
    whole, _, expected = ppo()
    whole.step()
    trainer, printed, found = ppo()
    shortage = Shortage(trainer.models.policy, fits=2, after=after, where=where)
    row = trainer.step()
    assert shortage.refused == 1
    assert [len(printed), trainer.halved] == [1, True]
    assert "4 rows" in printed[0]
    assert "exempt from byte identity" in printed[0]
    for before, same in zip(found[:minibatch], expected[:minibatch], strict=True):
        assert all(torch.equal(before[name], same[name]) for name in same)
    require_equal(found[minibatch], expected[minibatch])
    assert len(found) == len(expected) == row["optimizer_steps"] == 4
    assert max(shortage.since) <= 2


def test_the_first_ratio_stays_1_when_the_first_minibatch_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """π_old is read again in the halves: to the bit (rule 7)."""
    gaps: list[float] = []

    def noted(logprobs: Tensor, old: Tensor, mask: Tensor, precision: str) -> None:
        gaps.append((logprobs - old).abs().max().item())

    monkeypatch.setattr(update, "require_same_policy", noted)
    trainer, _, _ = ppo(precision="bfloat16")
    Shortage(trainer.models.policy, fits=2, after=1)
    trainer.step()
    assert gaps == [0.0] * 5


def test_ppo_that_continues_from_a_checkpoint_plans_halves_from_the_start() -> None:
    trainer, printed, _ = ppo()
    Shortage(trainer.models.policy, fits=2)
    trainer.step()
    state = copy.deepcopy(trainer.state_dict())
    again, told, _ = ppo()
    shortage = Shortage(again.models.policy, fits=2)
    again.load_state_dict(state)
    assert (again.halved, len(told)) == (True, 1)
    assert "exempt from byte identity" in told[0]
    assert again.step() == trainer.step()
    assert (shortage.refused, max(shortage.rows), len(printed)) == (0, 2, 1)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("fits", "micro"), [(1, 4), (0, 1)], ids=["halves", "a single row"])
def test_ppo_stops_where_halves_do_not_fit(fits: int, micro: int, where: str) -> None:
    """One line names the parameters to lower; the models are unchanged."""
    trainer, printed, gradients = ppo(micro_batch_size=micro)
    before = [p.detach().clone() for p in trainer.models.policy.parameters()]
    Shortage(trainer.models.policy, fits=fits, where=where)
    with pytest.raises(UserError, match=r"micro_batch_size.*micro_batch_tokens.*gradient_checkpointing") as stopped:
        trainer.step()
    assert "\n" not in str(stopped.value)
    assert len(printed) == (1 if micro > 1 else 0)
    assert not gradients
    assert all(torch.equal(p, old) for p, old in zip(trainer.models.policy.parameters(), before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["sampling", "reading", "scoring"])
def test_passes_without_gradients_are_halved_too(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same samples and scores from smaller batches; only the phase that does not fit is halved."""
    whole, _, _ = ppo()
    trainer, printed, _ = ppo()
    limit, seen = {"sampling": 8, "reading": 2, "scoring": 2}[moment], []

    def guard(rows: int) -> None:
        seen.append(rows)
        if rows > limit:
            raise torch.OutOfMemoryError(REFUSED)

    if moment == "sampling":
        engine = trainer.engine
        trainer.engine = lambda policy, prompts, keys: guard(len(prompts)) or engine(policy, prompts, keys)  # type: ignore[func-returns-value]
    elif moment == "scoring":
        scorer = trainer.scoring.source.scorer
        trainer.scoring.source.scorer = lambda answers: guard(min(4, len(answers.texts))) or scorer(answers)  # type: ignore[func-returns-value]
    else:
        reference = trainer.models.predict_as_reference
        monkeypatch.setattr(trainer.models, "predict_as_reference", lambda b: guard(len(b.mask)) or reference(b))  # type: ignore[func-returns-value]
    expected, rollout = whole.rollout(), trainer.rollout()
    assert rollout.response_ids == expected.response_ids
    torch.testing.assert_close(rollout.old_logprobs, expected.old_logprobs, rtol=1e-5, atol=1e-5)
    assert torch.equal(trainer.score(rollout).raw, whole.score(expected).raw)
    phase = "the update" if moment == "reading" else moment
    assert {name for name, halving in trainer.halvings.items() if halving.done} == {phase}
    assert sum(rows > limit for rows in seen) == 1
    assert len(printed) == 1


@pytest.mark.slow
def test_one_of_two_processes_runs_short_and_both_halve(tmp_path: Path) -> None:
    """And a loss of the text that is NaN in one of them stops both."""
    script = Path(__file__).with_name("short_of_memory.py")
    outcomes = run_pair(script, tmp_path)
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes[0].stderr + outcomes[1].stderr
    whole, short = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "short"))
    require_equal(short, whole)
    assert all("halved True" in outcome.stdout for outcome in outcomes)
    assert all("the loss is nan" in outcome.stdout for outcome in outcomes)


def run_pair(script: Path, folder: Path) -> "list[subprocess.CompletedProcess[str]]":
    """The script as the two processes of a run."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LEASH_RENDEZVOUS": str(folder / "store")}
    started = []
    for rank in "01":
        environment = os.environ | common | {"RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": ROOT}
        environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, str(script), str(folder)]
        started.append(
            subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    done = []
    for process in started:
        try:
            out, error = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
            error += "hangs"
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, error))
    return done


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS and /proc/self/status are Linux")
def test_a_real_limit_of_memory_is_survived() -> None:
    """The address space ends between what half a micro-batch needs and what a whole one needs."""
    script = Path(__file__).with_name("real_limit.py")
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | environment | {"PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "cannot be measured" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused: can't allocate memory" in done.stdout


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
