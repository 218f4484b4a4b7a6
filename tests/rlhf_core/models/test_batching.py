"""`batching.py`: rows of similar length together, results in the order of the rows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.models.batching import in_length_order, micro_batches

LENGTHS = st.lists(st.integers(0, 9), max_size=12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 5))
def test_results_come_in_the_order_of_the_rows(lengths: list[int], batch_size: int) -> None:
    batches: list[list[int]] = []

    def work(rows: list[int]) -> list[tuple[int, int]]:
        batches.append(rows)
        return [(row, lengths[row]) for row in rows]

    assert in_length_order(lengths, batch_size, work) == list(enumerate(lengths))
    assert [lengths[row] for rows in batches for row in rows] == sorted(lengths)
    assert all(len(rows) <= batch_size for rows in batches)


def test_a_result_that_is_missing_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        in_length_order([1, 2], 2, lambda rows: rows[:1])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 40))
def test_micro_batches_keep_to_their_tokens(lengths: list[tuple[int, int]], tokens: int) -> None:
    groups = micro_batches(range(len(lengths)), lengths, most_rows=4, tokens=tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        width = max(lengths[row][0] for row in group) + max(lengths[row][1] for row in group)
        assert len(group) == 1 or (len(group) <= 4 and len(group) * width <= tokens)
