"""Which prompts a step asks, and which responses stand in which minibatch: pure functions of seed, step and epoch.

Nothing here is state: a resumed run makes the same plan as one that was never interrupted.
"""

from collections.abc import Sequence

from rlhf_core.determinism import permutation

PROMPTS, MINIBATCHES, ROLLOUT, SAMPLES, TEXT = range(5)
"""First number of each key after the seed, so that the streams never meet."""


def prompts_of_step(step: int, batch_size: int, prompts: int, seed: int) -> list[int]:
    """Indices of the prompts of a step (counted from 0): every prompt once before any comes again, reshuffled each
    round."""
    first = step * batch_size
    positions = [divmod(first + place, prompts) for place in range(batch_size)]
    orders = {turn: permutation(prompts, seed, PROMPTS, turn) for turn in {turn for turn, _ in positions}}
    return [orders[turn][place] for turn, place in positions]


def minibatches_of_epoch(rows: int, minibatches: int, seed: int, step: int, epoch: int) -> list[list[int]]:
    """The rows of each minibatch of an epoch (counted from 0), drawn anew in each."""
    order = permutation(rows, seed, MINIBATCHES, step, epoch)
    size = rows // minibatches
    return [order[start : start + size] for start in range(0, size * minibatches, size)]


def micro_batches(
    minibatch: Sequence[int], lengths: Sequence[tuple[int, int]], rows: int, tokens: int | None = None
) -> list[list[int]]:
    """The rows of a minibatch in groups of at most `rows` rows and, with `tokens`, of at most so many tokens, padding
    included; a row that is longer stands alone.

    `lengths` are (prompt, response) lengths of all rows, in tokens. Responses of similar length stand together: less
    padding. The loss of a minibatch does not depend on how its rows are grouped (rule 13).
    """
    groups: list[list[int]] = []
    prompt = response = 0
    for row in sorted(minibatch, key=lambda i: (lengths[i][1], i)):
        prompt, response = max(prompt, lengths[row][0]), max(response, lengths[row][1])
        full = not groups or len(groups[-1]) == rows
        if full or (tokens is not None and (len(groups[-1]) + 1) * (prompt + response) > tokens):
            groups.append([])
            prompt, response = lengths[row]
        groups[-1].append(row)
    return groups
