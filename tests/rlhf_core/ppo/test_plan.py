"""`plan.py`: every prompt in its turn, every response in one minibatch, all a function of seed, step and epoch."""

import pytest

from rlhf_core.models.batching import micro_batches
from rlhf_core.ppo.plan import (
    MINIBATCHES,
    PROMPTS,
    ROLLOUT,
    SAMPLES,
    TEXT,
    minibatches_of_epoch,
    prompts_of_step,
)

LENGTHS = [7, 1, 4, 4, 9, 2, 7, 3, 5, 1, 8, 6]


def test_every_prompt_comes_once_before_any_comes_again() -> None:
    drawn = [i for step in range(10) for i in prompts_of_step(step, 4, 10, seed=1)]
    rounds = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(one) == list(range(10)) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 4


def test_a_batch_larger_than_the_prompts_repeats_some_of_them() -> None:
    counts = [prompts_of_step(0, 7, 3, seed=1).count(i) for i in range(3)]
    assert sorted(counts) == [2, 2, 3]


def test_rule_19_the_prompts_of_a_step_need_no_history() -> None:
    assert prompts_of_step(7, 4, 10, seed=1) == prompts_of_step(7, 4, 10, seed=1)
    assert prompts_of_step(0, 10, 10, seed=1) != prompts_of_step(0, 10, 10, seed=2)


WIDTHS = [(4 + i % 3, length) for i, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_every_response_is_in_one_minibatch_of_an_epoch(minibatches: int) -> None:
    plan = minibatches_of_epoch(len(LENGTHS), minibatches, 1, 0, 0)
    assert [len(minibatch) for minibatch in plan] == [len(LENGTHS) // minibatches] * minibatches
    assert sorted(i for minibatch in plan for i in minibatch) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
@pytest.mark.parametrize("tokens", [None, 1, 30, 1000])
def test_rule_13_micro_batches_only_group_a_minibatch(rows: int, tokens: int | None) -> None:
    """Each row once, within both limits (a row that is longer alone); similar lengths are together."""
    groups = micro_batches(range(len(LENGTHS)), WIDTHS, rows, tokens)
    flat = [i for group in groups for i in group]
    assert sorted(flat) == list(range(len(LENGTHS)))
    assert [LENGTHS[i] for i in flat] == sorted(LENGTHS)
    for group in groups:
        padded = len(group) * (max(WIDTHS[i][0] for i in group) + max(WIDTHS[i][1] for i in group))
        assert len(group) <= rows
        assert tokens is None or padded <= tokens or len(group) == 1


def test_micro_batches_of_tokens_are_filled_as_far_as_they_go() -> None:
    assert micro_batches([0, 1, 2, 3], [(2, 3)] * 4, most_rows=9, tokens=15) == [[0, 1, 2], [3]]


def test_minibatches_differ_in_every_epoch_step_and_seed() -> None:
    plans = [minibatches_of_epoch(12, 2, *key) for key in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0))]
    assert len({tuple(plan[0]) for plan in plans}) == 4
    assert plans[1] == minibatches_of_epoch(12, 2, 1, 0, 1)


def test_the_streams_of_a_step_never_meet() -> None:
    assert len({PROMPTS, MINIBATCHES, ROLLOUT, SAMPLES, TEXT}) == 5
