"""Which prompts a step asks, and which responses stand in which minibatch: pure functions of seed, step and epoch.

Nothing here is state: a resumed run makes the same plan as one that was never interrupted.
"""

from collections.abc import Sequence

from rlhf_core.determinism import permutation

PROMPTS, MINIBATCHES, ROLLOUT, SAMPLES = range(4)
"""First number of each key after the seed, so that the streams never meet."""


def prompts_of_step(step: int, batch_size: int, prompts: int, seed: int) -> list[int]:
    """Indices of the prompts of a step (counted from 0): every prompt once before any comes again, reshuffled each
    round."""
    first = step * batch_size
    positions = [divmod(first + place, prompts) for place in range(batch_size)]
    orders = {turn: permutation(prompts, seed, PROMPTS, turn) for turn in {turn for turn, _ in positions}}
    return [orders[turn][place] for turn, place in positions]


def minibatches_of_epoch(
    lengths: Sequence[int], minibatches: int, micro_batch_size: int, seed: int, step: int, epoch: int
) -> list[list[list[int]]]:
    """Minibatches of micro-batches of rows. Inside a minibatch, rows of similar length stand together: less padding.

    The loss of a minibatch does not depend on how its rows are grouped (rule 13).
    """
    order = permutation(len(lengths), seed, MINIBATCHES, step, epoch)
    size = len(order) // minibatches
    plan = []
    for start in range(0, size * minibatches, size):
        rows = sorted(order[start : start + size], key=lambda i: (lengths[i], i))
        plan.append([rows[k : k + micro_batch_size] for k in range(0, size, micro_batch_size)])
    return plan
