"""Models divided over processes by FSDP2: each process keeps its part of every weight, and weights are gathered layer
by layer in a pass. A model that is not divided passes through every function here unchanged."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlhf_core.errors import UserError
from rlhf_core.models import head
from rlhf_core.models.packed import can_pack

Result = TypeVar("Result")
ROOT = "_leash_root"
"""The attribute of a divided model with its root; not a submodule, because the root contains the model."""


class _Root(nn.Module):
    """Holds a model, so that FSDP's hooks are around a function and not around the model's own `forward`: weights
    outside the layers (embeddings, last norm, heads) are whole while the function runs."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.inside = False
        """Whether a function is running."""

    def forward(self, function: Callable[[], Result]) -> Result:
        """The function's result."""
        self.inside = True
        try:
            return function()
        finally:
            self.inside = False

    @property
    def in_order(self) -> list[FSDPModule]:
        """The root itself, then the layers."""
        return [module for module in self.modules() if isinstance(module, FSDPModule)]


def divide(model: PreTrainedModel, bfloat16: bool = False) -> PreTrainedModel:
    """Divide the weights over all processes of the default group, in place, and move them to the device of that group's
    backend. Gradients are added up over the processes, not averaged. All processes call it with equal models.

    With `bfloat16` the weights of the layers are gathered, and used, in bfloat16; the kept parts and the sums of
    gradients stay as they are, and embeddings, last norm and heads are not cast. Parameters become new objects. Raises
    UserError for an architecture whose layers transformers does not name.
    """
    if is_divided(model):
        return model
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDP_Root\) returned a view")  # none is changed in place
    can_pack(model)  # decided by passes through the whole model, at different times in different processes
    head.examine(model)
    layers = layers_of(model)
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, (distributed.get_world_size(),))
    in_layers = MixedPrecisionPolicy()
    if bfloat16:
        in_layers = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=in_layers)
    root = _Root(model)
    fully_shard(root, mesh=mesh, reshard_after_forward=True)
    for part in root.in_order:
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
    model.__dict__ |= {ROOT: root, "_apply": _refuse_to_move}
    with torch.no_grad():
        within(model, lambda: None)  # the root registers the layers as its own at the first pass
    return model


def is_divided(model: nn.Module) -> bool:
    """Whether `divide` was called with this model."""
    return ROOT in model.__dict__


def within(model: nn.Module, function: Callable[[], Result]) -> Result:
    """`function()`, a pass through the model or a part of it: its weights outside the layers are whole meanwhile, and
    the gradients of the tensors that it returns (alone, or in tuples, lists and dicts) are added up over the processes
    in the backward pass. All processes call it equally often, with functions that make one pass through the same
    layers. A second pass, through this model or another one, is a call of `within` in the function.
    """
    root: Any = model.__dict__.get(ROOT)  # FSDP adds its methods to the class
    if root is None or root.inside:
        return function()
    result: Result = root(function)
    if not torch.is_grad_enabled():
        root.reset_iter_state()  # passes without a graph differ in number between processes
    return result


@contextmanager
def whole(models: Iterable[nn.Module]) -> Iterator[None]:
    """In this context every process has the whole weights of the models, and may call them as often as it needs to,
    without gradients. All processes enter and leave it together."""
    roots = [model.__dict__[ROOT] for model in models if is_divided(model)]
    try:
        for root in roots:
            root.set_reshard_after_forward(False)
            for part in root.in_order:
                part.unshard()
        yield
    finally:
        for root in roots:
            root.set_reshard_after_forward(True)
            root.reset_iter_state()


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors on the CPU of the main process, gathered one after another; tensors without content elsewhere.
    All processes call it together."""
    return {name: _full(tensor) for name, tensor in tensors.items()}


@torch.no_grad()
def rejoin(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it was before `divide`, in place, with whole weights on the CPU of the main process; the other
    processes get tensors without content. All processes call it together."""
    if not is_divided(model):
        return model
    root = model.__dict__[ROOT]
    root.reset_iter_state()
    found: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        if isinstance(module, FSDPModule):  # its class moves parts of weights, and fails for whole ones
            _remove_hooks(module)
            module.__class__ = next(kind for kind in type(module).__bases__ if kind is not FSDPModule)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in found:
                    found[parameter] = nn.Parameter(_full(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = found[parameter]
    del model.__dict__[ROOT], model.__dict__["_apply"]
    return model


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients of all processes' parts to a global norm of at most `max_norm`. Returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()
    parts = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    square = torch.nn.utils.get_total_norm(parts).double() ** 2
    distributed.all_reduce(square)
    norm = square.sqrt()
    torch._foreach_mul_(parts, torch.clamp(max_norm / (norm + 1e-6), max=1.0).float())
    return norm.item()


def is_main() -> bool:
    """Whether this process is rank 0 of the default group, or the only one."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in any process."""
    flags = torch.tensor(int(flag), device=device)
    distributed.all_reduce(flags, distributed.ReduceOp.MAX)
    return bool(flags.item())


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layers whose weights are gathered one after another. Raises UserError where transformers names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UserError(
            f"{type(model).__name__}: transformers does not name its layers, so it cannot be divided; "
            "set processes to 1, or ppo.sharding to none"
        )
    return layers


def _refuse_to_move(*_: Any, **__: Any) -> NoReturn:
    """Instead of `_apply`, which `to`, `cuda`, `float` and the like call: FSDP would go on with the old weights outside
    the layers."""
    raise RuntimeError("the weights of a divided model cannot be moved or cast; call `rejoin` first")


def _remove_hooks(module: Any) -> None:
    """Remove FSDP's hooks around a module's forward pass. This alone uses its private state."""
    state = module._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def _full(tensor: Tensor) -> Tensor:
    full = tensor.detach()
    if isinstance(full, DTensor):
        full = full.full_tensor()
    return full.cpu() if is_main() else torch.empty_like(full, device="meta")
