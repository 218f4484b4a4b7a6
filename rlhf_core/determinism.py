"""What makes two runs equal: seeds, thread counts, deterministic kernels, and keys for counter-based randomness.

No sampling code draws from a global generator: it asks here for a stream that depends on names and indices only.
"""

import os
import random

import numpy as np
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Without it, matrix products on a GPU are not deterministic; read when CUDA starts, so set when this is imported. A
user's own value wins."""


def make_deterministic(seed: int, threads: int) -> None:
    """Seed every global generator, fix torch's CPU threads, and ask torch for deterministic kernels.

    Torch would then also fill every new tensor before it is written, for programs that read what nobody wrote; ours do
    not, and it is switched off: it cost time and changed nothing.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def stream(*key: int) -> np.random.Generator:
    """A Philox stream that depends on `key` alone, for example (seed, PPO step, prompt index, sample index).

    The key's length is part of it: SeedSequence would take (1, 2) and (1, 2, 0) for the same.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((len(key), *key))))


def permutation(length: int, *key: int) -> list[int]:
    """A random order of `length` items that depends on `key` alone."""
    return [int(i) for i in stream(*key).permutation(length)]
