"""`plan.py`: every prompt in its turn, every response in one minibatch, all a function of seed, step and epoch."""

import pytest

from rlhf_core.ppo.plan import MINIBATCHES, PROMPTS, ROLLOUT, SAMPLES, minibatches_of_epoch, prompts_of_step

LENGTHS = [7, 1, 4, 4, 9, 2, 7, 3, 5, 1, 8, 6]


def test_every_prompt_comes_once_before_any_comes_again() -> None:
    asked = [i for step in range(10) for i in prompts_of_step(step, 4, 10, seed=1)]
    rounds = [asked[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(one) == list(range(10)) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 4


def test_a_batch_larger_than_the_prompts_asks_some_of_them_again() -> None:
    counts = [prompts_of_step(0, 7, 3, seed=1).count(i) for i in range(3)]
    assert sorted(counts) == [2, 2, 3]


def test_rule_19_the_prompts_of_a_step_need_no_history() -> None:
    assert prompts_of_step(7, 4, 10, seed=1) == prompts_of_step(7, 4, 10, seed=1)
    assert prompts_of_step(0, 10, 10, seed=1) != prompts_of_step(0, 10, 10, seed=2)


@pytest.mark.parametrize("minibatches", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2, 5, 100])
def test_every_response_stands_in_one_minibatch_of_an_epoch(minibatches: int, micro: int) -> None:
    plan = minibatches_of_epoch(LENGTHS, minibatches, micro, 1, 0, 0)
    assert [sum(map(len, minibatch)) for minibatch in plan] == [len(LENGTHS) // minibatches] * minibatches
    assert sorted(i for minibatch in plan for rows in minibatch for i in rows) == list(range(len(LENGTHS)))
    assert max(len(rows) for minibatch in plan for rows in minibatch) <= micro


def test_rule_13_micro_batches_only_group_a_minibatch() -> None:
    """The rows of a minibatch are the same whatever the micro-batch size; similar lengths stand together."""
    one, whole = (minibatches_of_epoch(LENGTHS, 2, micro, 1, 0, 0) for micro in (1, 100))
    assert [[i for rows in minibatch for i in rows] for minibatch in one] == [minibatch[0] for minibatch in whole]
    lengths = [LENGTHS[i] for i in whole[0][0]]
    assert lengths == sorted(lengths)


def test_minibatches_are_drawn_anew_in_every_epoch_step_and_seed() -> None:
    """The lengths are equal, so that only the draw decides."""
    plans = [minibatches_of_epoch([3] * 12, 2, 6, *key) for key in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0))]
    assert len({tuple(plan[0][0]) for plan in plans}) == 4
    assert plans[1] == minibatches_of_epoch([3] * 12, 2, 6, 1, 0, 1)


def test_the_streams_of_a_step_never_meet() -> None:
    assert len({PROMPTS, MINIBATCHES, ROLLOUT, SAMPLES}) == 4
