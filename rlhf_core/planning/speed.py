"""Tokens per second on this machine, measured in a few seconds on a model of the same width with a single layer."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_core.models.batch import pad_batch
from rlhf_core.models.sequence_logprobs import response_logprobs
from rlhf_core.planning.shapes import Shapes, rows_of

SMALL = 20_000_000
"""Parameters up to which the whole model is measured."""
SECONDS = 0.7
"""How long each measurement is repeated."""
ROWS, LENGTH = 4, 64
VOCABULARY = 2048


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one model, float32, one process."""

    train: float
    """Forward and backward."""
    read: float
    """Forward."""
    sample: float
    """One new token for each of some rows, without the reading of the cache."""


def measured_device() -> str:
    """Where `calibrate` measures."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU of this machine"


def calibrate(shapes: Shapes, rows: int) -> Speed:
    """The speed of the model on the GPU if there is one, else on the CPU; `rows` are sampled side by side."""
    full = shapes.causal_lm()
    is_small = sum(p.numel() for p in full.parameters()) <= SMALL
    config = copy.deepcopy(shapes.config) if is_small else _one_layer(shapes.config)
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    share = _multiplied(model) / _multiplied(full)
    batch = pad_batch(
        rows_of(ROWS, 1, config.vocab_size), rows_of(ROWS, LENGTH - 1, config.vocab_size), 0, model.device
    )
    column = batch.input_ids[:1, :1].repeat(min(rows, 64), 1)

    def train() -> None:
        response_logprobs(model, batch).sum().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    def read() -> None:
        with torch.no_grad():
            response_logprobs(model, batch)

    def sample() -> None:
        with torch.no_grad():
            model(input_ids=column, use_cache=False)

    works = ((train, ROWS * LENGTH), (read, ROWS * LENGTH), (sample, len(column)))
    return Speed(*(share * tokens / _seconds(work) for work, tokens in works))


def _one_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration with a single layer and a small vocabulary."""
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size = 1, VOCABULARY
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, None)
    return small


def _multiplied(model: PreTrainedModel) -> int:
    """Weights that every token is multiplied with."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear | Conv1D))


def _seconds(work: Callable[[], None]) -> float:
    """Seconds of one call, after a first one that is not counted."""
    work()
    _wait()
    start, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - start < SECONDS:
        work()
        _wait()
        calls += 1
    return (time.perf_counter() - start) / calls


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
