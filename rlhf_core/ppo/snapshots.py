"""Snapshots of the policy during a PPO run: its trained weights (with LoRA the adapters), one file a step. They are for
evaluation; training cannot continue from them."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core import files
from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.precision import Frozen
from rlhf_core.errors import UserError
from rlhf_core.finite import require_finite
from rlhf_core.models.hf import load_weights, save_weights, shapes_in, unique_weights
from rlhf_core.models.lora import add_lora
from rlhf_core.models.precision import frozen_dtype
from rlhf_core.models.quantised import is_quantised
from rlhf_core.models.sharding import gathered, is_main
from rlhf_core.ppo.actor_critic import ActorCritic

SETTINGS = "settings.json"
NAME = re.compile(r"step-(\d+)\.safetensors")


def path_of(folder: Path, step: int) -> Path:
    """The file of the snapshot after `step` steps."""
    return folder / f"step-{step:06d}.safetensors"


def steps_in(folder: Path) -> list[int]:
    """The steps after which there is a snapshot, in order."""
    found = (NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


def write(folder: Path, models: ActorCritic, step: int, lora: LoraSettings | None = None) -> None:
    """Write the policy after `step` steps, atomically; `lora` is the run's, for `load`. In the run's precision,
    adapters in float32. Raises NonFiniteError for NaN or infinity. Where models are divided all processes
    call it; only the main one writes."""
    weights = gathered(trained_weights(models))
    if not is_main():
        return
    require_finite(weights, "weights")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"lora": None if lora is None else lora.model_dump()}
    with files.atomic(folder / SETTINGS) as place:
        place.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    save_weights(path_of(folder, step), weights, frozen_dtype(models.precision) if lora is None else None)


def trained_weights(models: ActorCritic) -> dict[str, Tensor]:
    """The policy's trained weights: the adapters, or all (tied weights once)."""
    adapter = models.adapters.get("policy")
    return unique_weights(models.policy) if adapter is None else adapter.state_dict()


def are_adapters(folder: Path) -> bool:
    """Whether the snapshots are adapters, without the weights below them. Raises UserError where there are none."""
    return _settings(folder)["lora"] is not None


def start_precision(folder: Path) -> Frozen:
    """Of the weights of `start` in `load`: 4 bits where the adapters were trained above 4-bit weights. Raises UserError
    where there are no snapshots."""
    lora = _settings(folder)["lora"]
    return "nf4" if lora is not None and LoraSettings.model_validate(lora).quantize == "nf4" else "float32"


def _settings(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: no snapshots; `leash run ppo` makes them") from None
    return found


@torch.no_grad()
def load(folder: Path, step: int, start: PreTrainedModel) -> PreTrainedModel:
    """`start`, changed in place into the policy as it was after `step` steps; with LoRA it must have the weights that
    the run began with, in 4 bits where `start_precision` says so, else it may be the policy of any step. The result has
    float32 weights where the snapshot holds adapters. Raises UserError for a snapshot that is missing, or of another
    model, ValueError for a start in 4 bits where the run's was not, or the reverse."""
    path, settings = path_of(folder, step), _settings(folder)
    try:
        shapes = shapes_in(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such snapshot; `leash run ppo` makes them") from None
    if settings["lora"] is not None:
        if is_quantised(start) != (start_precision(folder) == "nf4"):
            raise ValueError(f"the adapters in {folder} were trained above other weights: see `start_precision`")
        adapter = add_lora(start, LoraSettings.model_validate(settings["lora"]), seed=0)  # all its numbers are saved
        adapter.load_state_dict(load_file(path))
        return adapter.merge()
    own = unique_weights(start)
    if shapes != {name: tuple(tensor.shape) for name, tensor in own.items()}:
        raise UserError(f"{path}: a snapshot of another model than {start.name_or_path or type(start).__name__}")
    load_weights(path, own)
    return start
