"""Best-of-n from N samples: weights of the unbiased estimator, and the KL of best-of-n. Pure functions of arrays."""

import math

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from numpy.typing import ArrayLike


def best_of_n_weights(rewards: ArrayLike, n: int) -> Float[ndarray, "*prompts samples"]:
    """The probability that each of a prompt's N samples is the best of n of them drawn without replacement.

    `rewards` is [N] or [prompts, N]; so are the weights, in the order of the samples. The i-th worst has weight
    C(i − 1, n − 1) / C(N, n). Averaging any value of a sample (gold, reward, win, length) with these weights gives an
    unbiased estimate of its mean under best-of-n, with less variance than the best of the first n (the estimator of
    Nakano et al. 2021, appendix I, used by Gao et al. 2022). Of equal rewards the earlier sample counts as the better.

    Raises ValueError unless 1 ≤ n ≤ N.
    """
    table = np.asarray(rewards, dtype=np.float64)
    samples = table.shape[-1] if table.ndim else 0
    if not 1 <= n <= samples:
        raise ValueError(f"best-of-{n} needs at least {max(1, n)} samples a prompt and n at least 1, not {samples}")
    total = math.comb(samples, n)
    by_place = np.array([math.comb(samples - 1 - place, n - 1) / total for place in range(samples)])
    best_first = np.argsort(-table, axis=-1, kind="stable")
    weights = np.empty_like(table)
    np.put_along_axis(weights, best_first, np.broadcast_to(by_place, table.shape), axis=-1)
    return weights


def best_of_n_kl(n: int) -> float:
    """log n − (n − 1)/n nats: KL(best-of-n ‖ the model it samples from) of one answer (Stiennon et al. 2020, appendix).

    Exact where no two answers ever have the same reward, such as continuous ones; otherwise an upper bound: equal
    answers, or few likely ones, make the true KL smaller (Beirami et al. 2024). Raises ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"best-of-n needs n at least 1, not {n}")
    return math.log(n) - (n - 1) / n
