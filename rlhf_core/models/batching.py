"""Batches of rows of similar length, which need less padding."""

from collections.abc import Iterable, Sequence

import torch

TOKENS_ON_CPU = 2048
"""Tokens of a training pass, padding included; larger passes do not fit into the cache. It changes results by rounding
only."""
TOKENS_ON_ACCELERATOR = 2**17


def tokens_per_pass(device: torch.device) -> int:
    """Tokens of a training pass on this device, padding included."""
    return TOKENS_ON_CPU if device.type == "cpu" else TOKENS_ON_ACCELERATOR


def packed_batches(
    rows: Iterable[int], sequences: Sequence[Sequence[int]], most_rows: int, tokens: int | None = None
) -> list[list[int]]:
    """Rows in groups for passes without padding (`Packed`): of at most `most_rows` rows and, with `tokens`, of at most
    so many distinct prefixes, which is what such a pass computes; a longer row is a group of its own.

    `sequences` are the token ids of all rows, prompt and response. Rows with a common prefix come together. The loss of
    a minibatch does not depend on how its rows are grouped (rule 13).
    """
    groups: list[list[int]] = []
    last: Sequence[int] = ()
    used = 0
    for row in sorted(rows, key=lambda i: (*sequences[i], -1, i)):
        sequence = sequences[row]
        shared = next((t for t, (a, b) in enumerate(zip(last, sequence, strict=False)) if a != b), None)
        used += len(sequence) - (min(len(last), len(sequence)) if shared is None else shared)
        if not groups or len(groups[-1]) == most_rows or (tokens is not None and used > tokens):
            groups.append([])
            used = len(sequence)
        groups[-1].append(row)
        last = sequence
    return groups


def micro_batches(
    rows: Iterable[int],
    lengths: Sequence[tuple[int, int]],
    most_rows: int,
    tokens: int | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Rows in groups for padded passes: of at most `most_rows` rows and, with `tokens`, of at most so many tokens,
    padding included; a longer row is a group of its own.

    `lengths` are the (prompt, response) lengths of all rows in tokens; prompts are padded to the longest prompt of the
    group, responses to the longest response. Rows of similar response length come together; with `prompts` (those of
    all rows, as token ids) rows of equal prompts.
    """
    groups: list[list[int]] = []
    prompt = response = 0
    for row in sorted(rows, key=lambda i: (prompts[i] if prompts else (), lengths[i][1], i)):
        prompt, response = max(prompt, lengths[row][0]), max(response, lengths[row][1])
        full = not groups or len(groups[-1]) == most_rows
        if full or (tokens is not None and (len(groups[-1]) + 1) * (prompt + response) > tokens):
            groups.append([])
            prompt, response = lengths[row]
        groups[-1].append(row)
    return groups
