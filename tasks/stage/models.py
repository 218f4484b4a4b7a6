"""The models that a stage uses and does not train, and the kernels that compute them."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rlhf_core.data.classifiers import model_folder
from rlhf_core.determinism import make_deterministic
from rlhf_core.models.hf import default_device, load_causal_lm, place
from tasks.stage.stage import Stage
from tasks.stage.trust import trusts

EXTRA = "models/extra"
"""Folder of the user's models for the comparison."""
NOT_DETERMINISTIC = "deterministic: false selects the fastest kernels, so that this run is exempt from byte identity"


def set_numerics(stage: Stage[Any], seed: int | None = None) -> None:
    """Seed every generator with the run's seed, or with `seed`, and select kernels. With `deterministic: false` the
    stage is exempt from byte identity, which it prints and records."""
    common, seed = stage.common, stage.seed if seed is None else seed
    tf32 = common.precision == "bfloat16"
    make_deterministic(seed, common.threads, deterministic=common.deterministic, tf32=tf32)
    if not common.deterministic:
        stage.exempt(NOT_DETERMINISTIC)


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
