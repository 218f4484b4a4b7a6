"""`reward.py`: one batch for all pairs of a prompt, and resume to the byte."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.reward import RewardConfig
from rlhf_core.models.batch import pad_batch, sequence_scores
from rlhf_core.reward import (
    Comparison,
    PairScores,
    pair_batch,
    score_pairs,
    train_reward_model,
)
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
CONFIG = RewardConfig(learning_rate=3e-3, epochs=2, batch_size=4, warmup_steps=1, weight_decay=0.0, max_tokens=64)
LORA = CONFIG.model_copy(update={"learning_rate": 2e-2, "lora": LoraSettings(rank=2, alpha=4.0)})


def test_all_pairs_of_a_prompt_are_in_one_batch_and_each_response_once() -> None:
    batch, chosen, rejected = pair_batch(COMPARISONS[1:3], PAD)
    assert len(batch.input_ids) == sum(len(c.responses) for c in COMPARISONS[1:3]) == 7
    assert list(zip(chosen.tolist(), rejected.tolist(), strict=True)) == [(0, 1), (2, 1), (3, 4), (5, 4), (5, 6)]
    rows = [[*c.prompt, *r] for c in COMPARISONS[1:3] for r in c.responses]
    for ids, attention, row in zip(batch.input_ids, batch.attention_mask, rows, strict=True):
        assert ids[attention.bool()].tolist() == row


def test_the_training_loss_is_that_of_the_batchs_pairs(build_scalar: Build, make_run: Callable[..., Run]) -> None:
    whole = RewardConfig(**(CONFIG.model_dump() | {"batch_size": 12, "epochs": 1}))
    log = train_reward_model(build_scalar(), COMPARISONS, whole, PAD, make_run())
    before = score_pairs(build_scalar(), COMPARISONS, PAD, 12)
    assert log[0]["loss"] == pytest.approx(before.loss, abs=1e-5)
    assert log[0]["accuracy"] == pytest.approx(before.right.mean().item())


@pytest.mark.parametrize("batch_size", [1, 5, 12])
def test_pairs_are_scored_alike_in_every_batch(kind: str, build_scalar: Build, batch_size: int) -> None:
    model = build_scalar(kind)
    scores = score_pairs(model, COMPARISONS, PAD, batch_size)
    expected = []
    for c in COMPARISONS:
        alone = [sequence_scores(model, pad_batch([c.prompt], [r], PAD)).item() for r in c.responses]
        expected += [(alone[better], alone[worse]) for better, worse in c.pairs]
    assert scores.chosen.tolist() == pytest.approx([a for a, _ in expected], abs=1e-5)
    assert scores.rejected.tolist() == pytest.approx([b for _, b in expected], abs=1e-5)


def test_equal_scores_are_half_right() -> None:
    scores = PairScores(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 1.0, 2.0]))
    assert scores.right.tolist() == [1.0, 0.0, 0.5]
    assert scores.loss == pytest.approx((math.log(1 + math.exp(-1)) + math.log(1 + math.e) + math.log(2)) / 3)


@pytest.mark.parametrize("config", [CONFIG, LORA], ids=["all weights", "lora"])
def test_training_learns_the_preference(
    config: RewardConfig, build_scalar: Build, make_run: Callable[..., Run]
) -> None:
    model = build_scalar()
    longer = config.model_copy(update={"epochs": 10})
    before = score_pairs(model, COMPARISONS, PAD, 4)
    train_reward_model(model, COMPARISONS, longer, PAD, make_run())
    after = score_pairs(model, COMPARISONS, PAD, 4)
    assert before.right.mean() < 0.8
    assert after.right.mean() > 0.95
    assert after.loss < 0.2 * before.loss


def test_lora_trains_adapters_and_head_alone_and_leaves_a_plain_model(
    kind: str, build_scalar: Build, make_run: Callable[..., Run]
) -> None:
    """While it trains, the base's weights are untouched; afterwards each linear layer differs by a matrix of rank 2."""
    model = build_scalar(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[set[str]] = []

    def look(step: int, total: int, values: dict[str, float]) -> None:
        base = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if "lora_" not in name}
        seen.append({name for name, p in base.items() if not torch.equal(before[name], p)})

    train_reward_model(model, COMPARISONS, LORA, PAD, replace(make_run(), report=look))
    after = model.state_dict()
    assert seen == [set(), *[{"score.weight"}] * 5]  # warm-up: the first step's learning rate is 0
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])} - {"score.weight"}
    assert len(changed) == 2 * (4 if kind == "gpt2" else 7)
    assert {torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3).item() for name in changed} == {2}


class Killed(Exception):
    """Simulates a kill during training."""


@pytest.mark.slow
@pytest.mark.chosen("all weights")
@pytest.mark.parametrize("config", [CONFIG, LORA], ids=["all weights", "lora"])
def test_failure_01_a_killed_run_continues_to_the_same_bytes(
    config: RewardConfig, build_scalar: Build, make_run: Callable[..., Run]
) -> None:
    """A checkpoint has the trained weights; those below adapters are the start's."""

    def kill(step: int, total: int, values: dict[str, float]) -> None:
        if step == 5:
            raise Killed

    whole, resumed = build_scalar(), build_scalar(seed=9 if config.lora is None else 0)
    expected = train_reward_model(whole, COMPARISONS, config, PAD, make_run("whole", checkpoint_every=2))
    run = make_run("killed", checkpoint_every=2)
    with pytest.raises(Killed):
        train_reward_model(build_scalar(), COMPARISONS, config, PAD, replace(run, report=kill))
    log = train_reward_model(resumed, COMPARISONS, config, PAD, run)
    assert [row for row in log if "loss" in row] == [row for row in expected if "loss" in row]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_a_finished_lora_training_is_merged_again_from_its_last_checkpoint(
    build_scalar: Build, make_run: Callable[..., Run]
) -> None:
    """Killed after the last step, before the stage had saved the model."""
    first, again = build_scalar(), build_scalar()
    expected = train_reward_model(first, COMPARISONS, LORA, PAD, make_run(checkpoint_every=2))
    log = train_reward_model(again, COMPARISONS, LORA, PAD, make_run(checkpoint_every=2))
    assert log == [row for row in expected if "loss" in row]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("config", [CONFIG, LORA], ids=["all weights", "adapters"])
def test_precision_bfloat16_leaves_float32_weights(
    config: RewardConfig, build_scalar: Build, make_run: Callable[..., Run]
) -> None:
    """Above a frozen body in bfloat16 the adapters are float32, and what they are merged into is, too."""
    exact, rounded = build_scalar(), build_scalar()
    if config.lora:
        getattr(rounded, rounded.base_model_prefix).bfloat16()
    wanted = train_reward_model(exact, COMPARISONS, config, PAD, make_run("exact"))
    found = train_reward_model(rounded, COMPARISONS, config, PAD, make_run("rounded", precision="bfloat16"))
    assert found[0]["loss"] != wanted[0]["loss"]
    assert found[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=0.02)
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.float32}
