"""Seeds, threads, deterministic kernels, and random streams that depend on their key only. No sampling code uses a
global generator."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rlhf_core.errors import UserError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
OURS = ":4096:8"
NONE_EXISTS = " does not have a deterministic implementation"
"""What torch writes behind the name of an operation."""
os.environ.setdefault(WORKSPACE, OURS)
"""Without it, matrix products on a GPU are not deterministic; read when CUDA starts, so set at import. A user's own
value has priority."""


def make_deterministic(seed: int, threads: int, *, deterministic: bool = True, tf32: bool = False) -> None:
    """Seed every global generator, fix torch's CPU threads, and select kernels.

    Args:
        seed: of Python, NumPy and torch.
        threads: of torch on the CPU.
        deterministic: select deterministic kernels, and no attention of cuDNN, whose backward pass has none. Filling of
            uninitialised memory, which torch adds to them, is switched off: it costs time. False selects the fastest
            kernels; two runs may then differ.
        tf32: float32 matrix products may round their factors to 10 bits (TensorFloat-32) on a GPU. On a CPU they are
            exact, and where it has no AMX computed by oneDNN, which takes half the time of MKL on AMD. This is the
            only place that decides on it.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)
    rounds_to_8_bits = torch.cpu.get_capabilities().get("amx_bf16", False)  # with "medium"; heads need more
    torch.set_float32_matmul_precision("highest" if not tf32 else "high" if rounds_to_8_bits else "medium")
    if not deterministic and os.environ.get(WORKSPACE) == OURS:
        del os.environ[WORKSPACE]


@contextmanager
def strict_kernels() -> Iterator[None]:
    """In this context, where deterministic kernels are selected, an operation that has none raises UserError instead of
    a warning. The backward pass of attention on CUDA is deterministic in this mode only. Not run on a GPU."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(before[0])
    try:
        yield
    except RuntimeError as error:
        if NONE_EXISTS not in str(error):
            raise
        operation = str(error).split(NONE_EXISTS)[0].split()[-1:]
        raise UserError(
            f"{' '.join(operation)} has no deterministic kernel on this device; set deterministic: false"
        ) from None
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def stream(*key: int) -> np.random.Generator:
    """A Philox stream that depends on `key` alone, for example (seed, PPO step, prompt index, sample index).

    The key's length is part of it: SeedSequence gives the same stream for (1, 2) and (1, 2, 0).
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((len(key), *key))))


def permutation(length: int, *key: int) -> list[int]:
    """A random order of `length` items that depends on `key` alone."""
    return [int(i) for i in stream(*key).permutation(length)]
