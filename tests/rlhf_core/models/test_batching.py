"""`batching.py`: rows of similar length together."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.determinism import stream
from rlhf_core.models.batching import micro_batches, packed_batches
from rlhf_core.models.packed import Packed


@settings(max_examples=50, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 40))
def test_micro_batches_keep_to_their_tokens(lengths: list[tuple[int, int]], tokens: int) -> None:
    groups = micro_batches(range(len(lengths)), lengths, most_rows=4, tokens=tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        width = max(lengths[row][0] for row in group) + max(lengths[row][1] for row in group)
        assert len(group) == 1 or (len(group) <= 4 and len(group) * width <= tokens)


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=12)


@settings(max_examples=100, derandomize=True)
@given(SEQUENCES, st.integers(1, 5), st.integers(1, 20))
def test_packed_batches_count_the_tokens_that_a_pass_computes(
    sequences: list[list[int]], rows: int, tokens: int
) -> None:
    """The nodes of the prefix tree; each group is within both limits, and the next row would not fit."""
    groups = packed_batches(range(len(sequences)), sequences, rows, tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(sequences)))

    def nodes(group: list[int]) -> int:
        return len(Packed.of([sequences[row] for row in group]).input_ids)

    for group in groups:
        assert len(group) <= rows
        assert nodes(group) <= tokens or len(group) == 1
    for group, following in itertools.pairwise(groups):
        assert len(group) == rows or nodes([*group, following[0]]) > tokens


def test_micro_batches_are_full_at_the_lengths_of_real_dialogues() -> None:
    """HH's: prompts of 20 to 400 tokens that begin with the same words of a template, answers of 10 to 384, 64 of them
    in a minibatch of 16,384 tokens a pass."""
    random = stream(33)
    prompt_ids = [[1, 2, 3, *random.integers(10, 50_000, int(n))] for n in random.lognormal(4.6, 0.7, 64).clip(20, 400)]
    sequences = [
        [*ids, *random.integers(10, 50_000, int(random.integers(10, 384)))] for ids in prompt_ids for _ in (1, 2)
    ]
    for limit in (2048, 4096, 16_384):
        groups = packed_batches(range(len(sequences)), sequences, len(sequences), limit)
        used = [len(Packed.of([sequences[row] for row in group]).input_ids) for group in groups[:-1]]
        assert sum(used) / len(used) / limit >= 0.8
