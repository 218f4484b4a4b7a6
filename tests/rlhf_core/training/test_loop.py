"""`loop.py`: the order of the data, the schedule, passes, and which weights decay. What it trains is tested with SFT,
pretraining, reward model and DPO."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from rlhf_core.training.loop import Schedule, Training, passes_of
from rlhf_core.training.run import Run

Build = Callable[..., PreTrainedModel]
MakeRun = Callable[..., Run]


def training(model: PreTrainedModel, run: Run, schedule: Schedule) -> Training:
    """Ten items, whose loss is the sum of all weights."""

    def sums(places: Sequence[int]) -> dict[str, Tensor]:
        return {"loss": torch.stack([p.sum() for p in model.parameters()]).sum() * len(places)}

    return Training(model, sums, [1] * 10, list(range(1, 11)), schedule, run, "a key")


def test_each_epoch_has_every_item_once_in_an_order_of_its_own(build_lm: Build, make_run: MakeRun) -> None:
    """The last batch of an epoch is smaller."""
    loop = training(build_lm(), make_run(), Schedule(1e-3, 4, 6, 0, 0.0))
    epochs = [[loop.batch(step) for step in range(start, start + 3)] for start in (0, 3)]
    assert [len(batch) for batch in epochs[0]] == [4, 4, 2]
    orders = [[place for batch in epoch for place in batch] for epoch in epochs]
    assert [sorted(order) for order in orders] == [list(range(10))] * 2
    assert orders[0] != orders[1]
    again = training(build_lm(), make_run("other", seed=4), Schedule(1e-3, 4, 6, 0, 0.0))
    assert again.batch(0) != loop.batch(0)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 5), (3, 10), (10, 10), (1, 1)])
def test_the_learning_rate_is_that_of_transformers_cosine(warmup: int, steps: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    expected = get_cosine_schedule_with_warmup(optimizer, warmup, steps)
    schedule = Schedule(0.1, 1, steps, warmup, 0.0)
    for step in range(steps):
        assert schedule.rate(step) == pytest.approx(expected.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        expected.step()


@hypothesis_settings(max_examples=100, derandomize=True)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 100))
def test_passes_have_every_item_once_and_keep_their_limits(tokens: list[int], items: int, most: int) -> None:
    groups = passes_of(range(len(tokens)), tokens, items, most)
    assert sorted(place for group in groups for place in group) == list(range(len(tokens)))
    for group in groups:
        assert len(group) <= items
        assert len(group) == 1 or sum(tokens[place] for place in group) <= most
    for group, following in pairwise(groups):
        together = sum(tokens[place] for place in [*group, following[0]])
        assert len(group) == items or together > most, "a pass is filled before the next begins"


def test_matrices_decay_and_biases_and_norms_do_not(build_lm: Build, make_run: MakeRun) -> None:
    """By AdamW's own rate: a step of 0.1 with weight decay 1 takes a tenth of a weight, besides Adam's step of 0.1."""
    model = build_lm("gpt2")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loop = training(model, make_run(), Schedule(0.1, 10, 1, 0, 1.0))
    loop.step()
    for name, parameter in model.named_parameters():
        kept = 0.9 if before[name].ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), kept * before[name] - 0.1, rtol=1e-4, atol=1e-3)
