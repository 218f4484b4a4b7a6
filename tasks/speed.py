"""Floating-point operations a second that models reach, for the times of `leash plan`."""

import time
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from rlhf_core.config.precision import Precision

GPU = {"float32": 2e13, "bfloat16": 3e14}
"""Operations a second of large products (about an A100). Not measured."""
SHARE, SAMPLING_SHARE = 0.3, 0.05
"""What training and reading reach of it, and sampling token by token. Assumptions."""
SECONDS, LONGEST, PASSES = 0.3, 1.0, 3
"""How long a kind of pass is measured: `SECONDS` and `PASSES`, but none begins after `LONGEST` seconds."""
OPERATIONS, WIDEST = 1e10, 2048
"""Of one pass, about, at most, and the size of the layer: a larger one is measured with fewer tokens, and smaller."""


@dataclass(frozen=True)
class Speed:
    """Operations a second."""

    sampling: float
    """Token by token, many rows side by side."""
    reading: float
    training: float


def of_gpu(precision: Precision) -> Speed:
    """As assumed."""
    return Speed(SAMPLING_SHARE * GPU[precision], SHARE * GPU[precision], SHARE * GPU[precision])


@cache
def of_cpu(hidden: int, intermediate: int, precision: Precision, threads: int) -> Speed:
    """Of a transformer layer of this size on this CPU, measured in some seconds: of the fastest pass.
    Beside other work, others can take many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measured(hidden, intermediate, precision)
    finally:
        torch.set_num_threads(before)


def _measured(hidden: int, intermediate: int, precision: Precision) -> Speed:
    if hidden > WIDEST:
        hidden, intermediate = WIDEST, intermediate * WIDEST // hidden
    heads = hidden // 64 if hidden % 64 == 0 else 1
    with torch.random.fork_rng(devices=[]):
        layer = nn.TransformerEncoderLayer(hidden, heads, intermediate, dropout=0.0, batch_first=True)
    each = 2 * (4 * hidden**2 + 2 * hidden * intermediate)  # operations for a token
    most = max(8, int(OPERATIONS / (3 * each)))

    def speed(rows: int, tokens: int, trains: bool = False) -> float:
        tokens = min(tokens, most)
        rows = max(1, min(rows, most // tokens))
        x = torch.ones(rows, tokens, hidden)
        speeds, start = list[float](), time.perf_counter()
        began = start
        while began - start < (SECONDS if len(speeds) >= PASSES else LONGEST):
            with torch.set_grad_enabled(trains), torch.autocast("cpu", torch.bfloat16, precision == "bfloat16"):
                sums = layer(x).sum()
            if trains:
                sums.backward()
            ended = time.perf_counter()
            speeds.append(each * rows * tokens * (1 + 2 * trains) / (ended - began))
            began = ended
        return max(speeds)

    return Speed(sampling=speed(128, 1), reading=speed(8, 64), training=speed(8, 64, trains=True))
