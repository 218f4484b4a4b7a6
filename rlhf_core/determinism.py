"""Seeds, threads, deterministic kernels, and random streams that depend on their key only. No sampling code uses a
global generator."""

import os
import random

import numpy as np
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""Without it, matrix products on a GPU are not deterministic; read when CUDA starts, so set at import. A user's own
value has priority."""


def make_deterministic(seed: int, threads: int) -> None:
    """Seed every global generator, fix torch's CPU threads, and select deterministic kernels. Filling of uninitialised
    memory, which torch adds to deterministic kernels, is switched off: it costs time."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def stream(*key: int) -> np.random.Generator:
    """A Philox stream that depends on `key` alone, for example (seed, PPO step, prompt index, sample index).

    The key's length is part of it: SeedSequence gives the same stream for (1, 2) and (1, 2, 0).
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((len(key), *key))))


def permutation(length: int, *key: int) -> list[int]:
    """A random order of `length` items that depends on `key` alone."""
    return [int(i) for i in stream(*key).permutation(length)]
