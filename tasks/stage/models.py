"""The models that a stage uses and does not train, and the kernels that compute them."""

import functools
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_core.data.classifiers import model_folder
from rlhf_core.determinism import make_deterministic
from rlhf_core.models.hf import default_device, load_causal_lm, place
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts

EXTRA = "models/extra"
"""Folder of the user's models for the comparison."""
SLOWER, REPEATED = 1.25, 4
"""How much longer bfloat16 takes where a stage warns, and products of which the fastest counts."""
NOT_DETERMINISTIC = "deterministic: false selects the fastest kernels, so that this run is exempt from byte identity"


def set_numerics(stage: Stage[Any], seed: int | None = None) -> None:
    """Seed every generator with the run's seed, or with `seed`, and select kernels. With `deterministic: false` the
    stage is exempt from byte identity, which it prints and records."""
    common, seed = stage.common, stage.seed if seed is None else seed
    tf32 = common.precision == "bfloat16"
    make_deterministic(seed, common.threads, deterministic=common.deterministic, tf32=tf32)
    if not common.deterministic:
        stage.exempt(NOT_DETERMINISTIC)
    if common.precision == "bfloat16" and default_device().type == "cpu" and (slower := bfloat16_time()) > SLOWER:
        stage.warn(
            f"precision: bfloat16 takes {slower:.1f} times as long as float32 for a product on this CPU; float32 is "
            "faster here, bfloat16 needs less memory"
        )


@functools.cache
def bfloat16_time() -> float:
    """The time of a product of matrices in bfloat16, over that in float32, on the CPU; measured once, in less than a
    second on most. It draws no random number."""

    def seconds(dtype: torch.dtype) -> float:
        a, b = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        starts = [time.perf_counter()]
        for _ in range(REPEATED):
            a @ b
            starts.append(time.perf_counter())
        return min(after - before for before, after in pairwise(starts))

    return seconds(torch.bfloat16) / seconds(torch.float32)


def load_frozen(stage: Stage[Any], folder: Path) -> PreTrainedModel:
    """The language model in a folder, for inference: in the run's precision, loaded straight to the default device.
    Raises UserError, see `load_causal_lm`."""
    trusted, device, frozen = trusts(stage), default_device(), stage.precision
    model = load_causal_lm(folder, trust_remote_code=trusted, frozen=frozen, device=device, log=stage.log)
    return place(model, device)


def folder_of(stage: Stage[Any], place: str, name: str, key: str) -> Path:
    """The user's Hugging Face folder `name` below `place`. Raises UserError with the parameter `key` if it is
    missing."""
    return model_folder(stage.root / place / name, f"{key}: {place}/{name}")
