"""Interpolated policies: weights between those of a start model and those of a model trained from it."""

import copy

import torch
from transformers import PreTrainedModel

from rlhf_core.errors import UserError
from rlhf_core.models.hf import unique_weights


@torch.no_grad()
def interpolate(start: PreTrainedModel, model: PreTrainedModel, eta: float) -> PreTrainedModel:
    """A copy of `model` with the weights start + η·(model − start): η = 0 gives `start`, η = 1 gives `model`.

    Neither model is changed. Raises UserError for an η outside [0, 1], and for models of other shapes.

    Source: Ramé et al. 2024, "WARP: On the Benefits of Weight Averaged Rewarded Policies", linear interpolation towards
    initialisation.
    """
    require_eta(eta)
    ours, theirs = unique_weights(start), unique_weights(model)
    require_same_shapes(ours, theirs, start, model)
    mixed = copy.deepcopy(model)
    for name, tensor in unique_weights(mixed).items():
        if tensor.is_floating_point():
            tensor.copy_(torch.lerp(ours[name].to(tensor), tensor, eta))
    return mixed


def require_eta(eta: float, name: str = "eta") -> None:
    """Raise UserError unless 0 ≤ η ≤ 1."""
    if not 0 <= eta <= 1:
        raise UserError(f"{name} {eta}: give a number from 0 (the start model) to 1 (the trained model)")


def require_same_shapes(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], start: PreTrainedModel, model: PreTrainedModel
) -> None:
    """Raise UserError that names the first weight that differs in name or shape."""
    for name in [*theirs, *ours]:
        shapes = [tuple(each[name].shape) if name in each else None for each in (ours, theirs)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"{_name(model)} cannot be interpolated with {_name(start)}: {name} is {_shape(shapes[1])} in the one "
                f"and {_shape(shapes[0])} in the other; both must be of one architecture"
            )


def _name(model: PreTrainedModel) -> str:
    return str(model.name_or_path or type(model).__name__)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " × ".join(map(str, shape)) or "a number"
