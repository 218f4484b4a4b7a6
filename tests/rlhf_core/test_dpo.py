"""`dpo.py`: what it learns on a toy, and resume to the byte."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_core.config.dpo import DPOConfig
from rlhf_core.config.lora import LoraSettings
from rlhf_core.dpo import (
    References,
    dpo_objective,
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


def train_dpo(
    model: PreTrainedModel, comparisons: list[Comparison], references: References, config: DPOConfig, run: Run
) -> list[dict[str, float]]:
    return train_on_pairs(model, comparisons, references, config, dpo_objective(config), PAD, run, "dpo")


def test_each_response_has_its_own_reference(build_lm: Build) -> None:
    model = build_lm()
    references = reference_logprobs(model, COMPARISONS, PAD)
    prompts = [c.prompt for c in COMPARISONS for _ in c.responses]
    responses = [response for c in COMPARISONS for response in c.responses]
    expected = sequence_logprobs(model, prompts, responses, PAD, 1)
    assert [value for row in references for value in row] == pytest.approx(expected, abs=1e-4)


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
    """A checkpoint has the trained weights; those below adapters are the start's."""

    def kill(step: int, total: int, values: dict[str, float]) -> None:
        if step == 5:
            raise Killed

    whole, resumed = build_lm(), build_lm(seed=9 if config.lora is None else 0)
    references = reference_logprobs(whole, COMPARISONS, PAD)
    expected = train_dpo(whole, COMPARISONS, references, config, make_run("whole", checkpoint_every=2))
    run = make_run("killed", checkpoint_every=2)
    with pytest.raises(Killed):
        train_dpo(build_lm(), COMPARISONS, references, config, replace(run, report=kill))
    log = train_dpo(resumed, COMPARISONS, references, config, run)
    assert [row for row in log if "loss" in row] == [row for row in expected if "loss" in row]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
