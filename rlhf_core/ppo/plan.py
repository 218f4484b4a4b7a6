"""Which prompts a step samples from, and which responses are in which minibatch: functions of seed, step and epoch, so
that a resumed run makes the same plan as an uninterrupted one."""

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
    """The rows of each minibatch of an epoch (counted from 0), in a new order in each."""
    order = permutation(rows, seed, MINIBATCHES, step, epoch)
    size = rows // minibatches
    return [order[start : start + size] for start in range(0, size * minibatches, size)]
