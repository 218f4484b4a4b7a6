"""A state whose tensors may be divided over processes, as a file and, in a folder beside it, one safetensors file of
each process. Any number of processes can read it. Reading executes no pickled code."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, empty

from rlhf_core.errors import UserError
from rlhf_core.models.sharding import any_process, is_main

FILES = "divided"
"""The key, in a file with a state, of the number of files with its divided tensors."""
NAME, SHAPE, DTYPE = "divided tensor", "shape", "dtype"
"""The keys of what stands for a divided tensor in the rest of a state."""


def save(place: Path, state: Mapping[str, Any]) -> None:
    """Write a state (mappings and sequences of tensors and plain types) to the file `place`, and its divided tensors to
    the folder of that name without its suffix. Where there are any all processes call it, and the main one writes the
    rest. Raises UserError, in all of them, unless the main one sees a file of each process."""
    rest, divided = split(state)
    if divided:
        write(place.with_suffix(""), divided)
        _require_all_files(place.with_suffix(""), next(iter(divided.values())).device)
        rest |= {FILES: distributed.get_world_size()}
    if not divided or is_main():
        torch.save(rest, place)


def read(place: Path, divide: bool = False) -> dict[str, Any]:
    """The state of `save`: tensors on the CPU or, with `divide`, those that were divided then over the processes of the
    default group, whose number may have changed. A file with anything but tensors and plain types is refused. Raises
    UserError for a file of a process that is missing."""
    state: dict[str, Any] = torch.load(place, weights_only=True, map_location="cpu")
    if (files := state.pop(FILES, None)) is None:
        return state
    joined: dict[str, Any] = join(state, place.with_suffix(""), files, divide)
    return joined


def split(state: Any, place: str = "state") -> tuple[Any, dict[str, DTensor]]:
    """The state without its divided tensors (mappings and sequences of tensors and plain types), and these by name."""
    if isinstance(state, DTensor):
        dtype = str(state.dtype).removeprefix("torch.")
        return {NAME: place, SHAPE: list(state.shape), DTYPE: dtype}, {place: state}
    if isinstance(state, Mapping):
        parts = {key: split(value, f"{place}.{key}") for key, value in state.items()}
        found = {name: tensor for _, tensors in parts.values() for name, tensor in tensors.items()}
        return {key: rest for key, (rest, _) in parts.items()}, found
    if isinstance(state, list | tuple):
        items = [split(value, f"{place}.{number}") for number, value in enumerate(state)]
        return type(state)(rest for rest, _ in items), {name: t for _, found in items for name, t in found.items()}
    return state, {}


def write(folder: Path, tensors: Mapping[str, DTensor]) -> None:
    """Each process writes its parts. All call it together, and an error in one of them is raised in all."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _plain_errors():
        state_dict_saver.save(_untied(tensors), storage_writer=writer)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """The error of a process instead of torch's CheckpointException, which is no Exception."""
    try:
        yield
    except CheckpointException as error:
        found = next((each for each, _ in error.failures.values()), None)
        cause = found if isinstance(found, Exception) else RuntimeError(str(error))
    else:
        return
    raise cause


def _require_all_files(folder: Path, device: torch.device) -> None:
    found, processes = count(folder), distributed.get_world_size()
    if any_process(is_main() and found != processes, device):
        raise UserError(
            f"{folder}: {found} files of {processes} processes are there; the folder must lie on a file system that "
            "all processes share"
        )


def count(folder: Path) -> int:
    """The number of files."""
    return len(list(folder.glob("*.safetensors")))


def join(rest: Any, folder: Path, files: int, divided: bool) -> Any:
    """The state that `split` took apart, with tensors on the CPU, or divided over the processes of the default group,
    whose number may have changed. Raises UserError unless all `files` files are there."""
    if count(folder) != files:
        raise UserError(f"{folder}: {count(folder)} of {files} files of a checkpoint are there; remove {folder.parent}")
    mesh = None
    if divided:
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        mesh = init_device_mesh(device, (distributed.get_world_size(),))
    tensors = dict(_places(rest, mesh))
    with warnings.catch_warnings(), _plain_errors():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state_dict_loader.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=mesh is None)
    return _filled(rest, tensors)


def as_divided(tensor: Any, parameter: Tensor) -> Any:
    """A whole tensor as it is, or divided as the parameter is, where they have one shape."""
    if not isinstance(parameter, DTensor) or not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
        return tensor
    if tensor.shape != parameter.shape:
        return tensor
    mesh = parameter.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements)


def divided_as(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A state of the optimizer with the moments of each parameter divided over the processes as the parameter is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        number: {name: as_divided(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return state | {"state": moments}


def _untied(tensors: Mapping[str, DTensor]) -> dict[str, Tensor]:
    """Tied weights as copies: a safetensors file has no shared memory."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = tensor.to_local().data_ptr()
        found[name] = tensor.detach().clone() if place in seen else tensor.detach()
        seen.add(place)
    return found


def _is_place(rest: Any) -> bool:
    return isinstance(rest, dict) and rest.keys() == {NAME, SHAPE, DTYPE}


def _places(rest: Any, mesh: DeviceMesh | None) -> list[tuple[str, Tensor]]:
    """An empty tensor for each divided one, by name."""
    if _is_place(rest):
        dtype = getattr(torch, rest[DTYPE])
        if mesh is None:
            return [(rest[NAME], torch.empty(rest[SHAPE], dtype=dtype))]
        return [(rest[NAME], empty(*rest[SHAPE], dtype=dtype, device_mesh=mesh, placements=[Shard(0)]))]
    values = rest.values() if isinstance(rest, dict) else rest if isinstance(rest, list | tuple) else ()
    return [pair for value in values for pair in _places(value, mesh)]


def _filled(rest: Any, tensors: Mapping[str, Tensor]) -> Any:
    if _is_place(rest):
        return tensors[rest[NAME]]
    if isinstance(rest, dict):
        return {key: _filled(value, tensors) for key, value in rest.items()}
    if isinstance(rest, list | tuple):
        return type(rest)(_filled(value, tensors) for value in rest)
    return rest
