"""`dpo.py`: the loss, what it learns on a toy, and resume to the byte."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from rlhf_core.config.dpo import DPOConfig
from rlhf_core.config.lora import LoraSettings
from rlhf_core.dpo import (
    Referenced,
    ReferencedCollator,
    References,
    dpo_loss,
    dpo_objective,
    implicit_margin,
    measure_pairs,
    reference_logprobs,
    train_on_pairs,
)
from rlhf_core.models.sequence_logprobs import sequence_logprobs
from rlhf_core.reward import Comparison
from rlhf_core.training.run import Run

Build = Callable[..., PreTrainedModel]
PAD, END, GOOD = 0, 1, 30
COMPARISONS = [
    Comparison(
        [3, 5 + i % 5, 4],
        [[GOOD, 10 + i, END], [11 + i, 12], [13 + i, GOOD, 14, 15, END], [20 + i % 3, END]][: 2 + i % 3],
        [(0, 1), (2, 1), (2, 3), (0, 3)][: 1 + i % 3],
    )
    for i in range(12)
]
CONFIG = DPOConfig(enabled=True, learning_rate=1e-3, epochs=2, batch_size=4, warmup_steps=1, max_tokens=64)
LORA = CONFIG.model_copy(update={"learning_rate": 1e-2, "lora": LoraSettings(rank=2, alpha=4.0)})
Four = tuple[float, float, float, float]
PAIRS = st.lists(st.tuples(*[st.floats(-60, 0)] * 4), min_size=1, max_size=6)


def train_dpo(
    model: PreTrainedModel, comparisons: list[Comparison], references: References, config: DPOConfig, run: Run
) -> list[dict[str, float]]:
    return train_on_pairs(model, comparisons, references, config, dpo_objective(config), PAD, run, "dpo")


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def columns(pairs: list[Four]) -> list[torch.Tensor]:
    return [tensor(*column) for column in zip(*pairs, strict=True)]


def test_dpo_loss_by_hand() -> None:
    """β 0.5; the policy likes the first chosen answer 2 nats more than the reference, the rejected one 1 nat less."""
    sides = tensor(-3.0, -8.0), tensor(-6.0, -4.0), tensor(-5.0, -8.0), tensor(-5.0, -4.0)
    assert implicit_margin(*sides, 0.5).tolist() == [1.5, 0.0]
    expected = (math.log(1 + math.exp(-1.5)) + math.log(2)) / 2
    assert dpo_loss(implicit_margin(*sides, 0.5)).item() == pytest.approx(expected)
    smoothed = (0.9 * math.log(1 + math.exp(-1.5)) + 0.1 * math.log(1 + math.exp(1.5)) + math.log(2)) / 2
    assert dpo_loss(implicit_margin(*sides, 0.5), label_smoothing=0.1).item() == pytest.approx(smoothed)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(PAIRS, st.floats(0.01, 2), st.sampled_from([0.0, 0.1, 0.4]))
def test_dpo_loss_equals_a_slow_loop(pairs: list[Four], beta: float, smoothing: float) -> None:
    slow = 0.0
    for chosen, rejected, ref_chosen, ref_rejected in pairs:
        margin = beta * (chosen - ref_chosen) - beta * (rejected - ref_rejected)
        slow += (1 - smoothing) * math.log1p(math.exp(-margin)) + smoothing * math.log1p(math.exp(margin))
    margins = implicit_margin(*columns(pairs), beta)
    assert dpo_loss(margins, smoothing).item() == pytest.approx(slow / len(pairs), rel=1e-9, abs=1e-12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(PAIRS, st.floats(0.01, 2), st.sampled_from([0.0, 0.1]))
def test_the_gradient_raises_the_chosen_and_lowers_the_rejected(
    pairs: list[Four], beta: float, smoothing: float
) -> None:
    """−β·(σ(−m) − ε)/n for the chosen answer, the opposite for the rejected one (Rafailov et al. 2023, section 4)."""
    chosen, rejected, ref_chosen, ref_rejected = columns(pairs)
    chosen.requires_grad_(True)
    rejected.requires_grad_(True)
    dpo_loss(implicit_margin(chosen, rejected, ref_chosen, ref_rejected, beta), smoothing).backward()
    margin = implicit_margin(chosen, rejected, ref_chosen, ref_rejected, beta).detach()
    expected = -beta * (torch.sigmoid(-margin) - smoothing) / len(pairs)
    assert chosen.grad is not None
    assert rejected.grad is not None
    torch.testing.assert_close(chosen.grad, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(rejected.grad, -expected, rtol=1e-9, atol=1e-12)


def test_dpo_loss_survives_large_margins() -> None:
    chosen = tensor(-5000.0, -1.0).requires_grad_(True)
    loss = dpo_loss(implicit_margin(chosen, tensor(-1.0, -5000.0), tensor(-1.0, -1.0), tensor(-1.0, -1.0), 1.0))
    loss.backward()
    assert loss.item() == pytest.approx(4999 / 2)
    assert chosen.grad is not None
    assert chosen.grad.tolist() == [-0.5, 0.0]


def test_each_row_has_its_own_reference(build_lm: Build) -> None:
    model = build_lm()
    references = reference_logprobs(model, COMPARISONS, PAD)
    items = [Referenced(c, r) for c, r in zip(COMPARISONS, references, strict=True)][3:6]
    batch = ReferencedCollator(PAD)(items)
    prompts = [c.prompt for c in COMPARISONS[3:6] for _ in c.responses]
    responses = [response for c in COMPARISONS[3:6] for response in c.responses]
    expected = sequence_logprobs(model, prompts, responses, PAD, 1)
    assert batch["reference"].tolist() == pytest.approx(expected, abs=1e-4)
    assert len(batch["input_ids"]) == len(responses)


def test_training_starts_at_log_2_and_measures_what_it_trains_on(build_lm: Build, make_run: Callable[..., Run]) -> None:
    """The policy is its own reference at first; against another one the first loss is that of all the batch's pairs."""
    whole = CONFIG.model_copy(update={"batch_size": 12, "epochs": 1})
    own, other = (reference_logprobs(build_lm(seed=seed), COMPARISONS, PAD) for seed in (0, 7))
    log = train_dpo(build_lm(), COMPARISONS, own, whole, make_run("own"))
    assert log[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert log[0]["margin"] == pytest.approx(0.0, abs=1e-5)
    log = train_dpo(build_lm(), COMPARISONS, other, whole, make_run("other"))
    before = measure_pairs(build_lm(), COMPARISONS, other, dpo_objective(whole), PAD)
    assert [log[0][name] for name in ("loss", "accuracy", "margin")] == pytest.approx(
        [before.loss, before.accuracy, before.margin], abs=1e-4
    )
    assert abs(before.margin) > 0.01


@pytest.mark.parametrize("config", [CONFIG, LORA], ids=["all weights", "lora"])
def test_the_implicit_reward_learns_the_order(config: DPOConfig, build_lm: Build, make_run: Callable[..., Run]) -> None:
    model = build_lm()
    names = set(model.state_dict())
    references = reference_logprobs(model, COMPARISONS, PAD)
    train_dpo(model, COMPARISONS, references, config.model_copy(update={"epochs": 8}), make_run())
    after = measure_pairs(model, COMPARISONS, references, dpo_objective(config), PAD)
    assert after.accuracy > 0.95
    assert after.loss < 0.5 * math.log(2)
    assert set(model.state_dict()) == names


def test_equal_rewards_are_half_right(build_lm: Build) -> None:
    model = build_lm()
    references = reference_logprobs(model, COMPARISONS, PAD)
    measured = measure_pairs(model, COMPARISONS, references, dpo_objective(CONFIG), PAD)
    assert (measured.accuracy, measured.margin, measured.loss) == (0.5, 0.0, pytest.approx(math.log(2)))


def test_a_larger_beta_moves_less(build_lm: Build, make_run: Callable[..., Run]) -> None:
    """β weighs the distance from the reference: log π moves less with a large one."""
    moved = []
    for beta in (0.1, 5.0):
        model, config = build_lm(), CONFIG.model_copy(update={"beta": beta, "epochs": 8})
        references = reference_logprobs(model, COMPARISONS, PAD)
        train_dpo(model, COMPARISONS, references, config, make_run(str(beta)))
        after = reference_logprobs(model, COMPARISONS, PAD)
        moved.append(sum(abs(a - b) for x, y in zip(after, references, strict=True) for a, b in zip(x, y, strict=True)))
    assert moved[1] < 0.7 * moved[0]


class Killed(Exception):
    """Simulates a kill during training."""


@pytest.mark.slow
@pytest.mark.chosen("lora")
@pytest.mark.parametrize("config", [CONFIG, LORA], ids=["all weights", "lora"])
def test_failure_01_a_killed_run_continues_to_the_same_bytes(
    config: DPOConfig, build_lm: Build, make_run: Callable[..., Run]
) -> None:
    def kill(step: int, total: int, values: dict[str, float]) -> None:
        if step == 5:
            raise Killed

    whole, resumed = build_lm(), build_lm(seed=9)
    references = reference_logprobs(whole, COMPARISONS, PAD)
    expected = train_dpo(whole, COMPARISONS, references, config, make_run("whole", checkpoint_every=2))
    run = make_run("killed", checkpoint_every=2)
    with pytest.raises(Killed):
        train_dpo(build_lm(), COMPARISONS, references, config, replace(run, report=kill))
    log = train_dpo(resumed, COMPARISONS, references, config, run)
    assert [row for row in log if "loss" in row] == [row for row in expected if "loss" in row]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
