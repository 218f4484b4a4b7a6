"""Counts the bytes of tensors while code runs on tensors without data: shapes and types are computed, numbers are not.
No other module depends on torch's fake tensors and dispatch modes.

Tensors of integers and masks that depend on no weight are real, so that the code takes the branches of a real run; what
depends on a weight has a shape only, and so has uninitialised memory, which is there to be written to. Where the code
reads a number from a tensor without data, it gets 1 (or true).
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ACTIVATIONS, LOGITS, CACHE = "activations", "logits", "key-value cache"
WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED = "weights", "gradients", "optimizer", "gathered"
DIVIDED = (WEIGHTS, GRADIENTS, OPTIMIZER)
"""Kinds of which each of several processes has its part."""
UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
}


@dataclass(frozen=True, order=True)
class Part:
    """What some memory is for: its kind, and the model, or "" for tensors of a pass."""

    kind: str
    model: str = ""


COPY = Part("copy")
"""Copies of divided weights in bfloat16; not counted."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active: the bytes of all tensors that live, and their highest sum, by part.

    Args:
        vocabulary: tensors with this last dimension are counted as logits.
        mode: in which the models were made.
        processes: over which the models are divided. Counted is one of them: its part of what is marked as `DIVIDED`,
            and all the rest. Copies of weights in bfloat16 are left out: FSDP gathers the weights in bfloat16, see
            `gathering`.
    """

    def __init__(self, vocabulary: int, mode: FakeTensorMode, processes: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocabulary, self.mode, self.processes = vocabulary, mode, processes
        self.live: Counter[Part] = Counter()
        self.peak, self.at_peak = 0, dict[Part, int]()
        self._total = 0
        self._parts: dict[int, Part] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the storages that it returns and that are new."""
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return _one(args[0].dtype)
        found = function(*args, **(kwargs or {}))
        if function in UNINITIALISED and found.is_floating_point() and not isinstance(found, FakeTensor):
            found = self.mode.from_tensor(found)
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._count(tensor, COPY if self._is_copy(function, args, tensor) else None)
        return found

    @contextmanager
    def gathering(self, sizes: Mapping[str, int]) -> Iterator[None]:
        """In this context each named model takes so many bytes more, for weights that are gathered. A context of
        `counting` must be inside."""
        for sign in (1, -1):
            for name, size in sizes.items():
                self.live[Part(GATHERED, name)] += sign * size
                self._total += sign * size
            if sign > 0:
                yield

    def mark(self, tensors: Iterable[Tensor], part: Part) -> None:
        """Count these tensors as `part`, from now on."""
        for tensor in tensors:
            self._count(tensor)
            storage = tensor.untyped_storage()
            before, size = self._parts[storage._cdata], storage.nbytes()
            self._add(before, -size)
            self._add(part, size)
            self._parts[storage._cdata] = part

    def follow(self, name: str, model: nn.Module) -> None:
        """Count the weights of a model, and its gradients as soon as there are some."""

        def marked(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self.mark([parameter.grad], Part(GRADIENTS, name))

        self.mark([*model.parameters(), *model.buffers()], Part(WEIGHTS, name))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(marked)  # type: ignore[no-untyped-call]

    def follow_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Count the optimizer's state as soon as there is some."""

        def found(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, Tensor)]
            self.mark(state, Part(OPTIMIZER, name))

        optimizer.register_step_post_hook(found)

    def restart(self) -> None:
        """Forget the peak so far: it is what lives now."""
        self.peak, self.at_peak = self._total, dict(self.live)

    def _is_copy(self, function: Any, args: Any, copied: Tensor) -> bool:
        if self.processes == 1 or function is not torch.ops.aten._to_copy.default or copied.dtype != torch.bfloat16:
            return False
        part = self._parts.get(args[0].untyped_storage()._cdata)
        return part is not None and part.kind == WEIGHTS

    def _count(self, tensor: Tensor, part: Part | None = None) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._parts:
            return
        size, key = storage.nbytes(), storage._cdata
        if part is None:
            part = Part(LOGITS) if tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary else Part(ACTIVATIONS)
        self._parts[key] = part
        self._add(part, size)
        weakref.finalize(storage, self._freed, key, size)
        if self._total > self.peak:
            self.restart()

    def _freed(self, key: int, size: int) -> None:
        self._add(self._parts.pop(key), -size)

    def _add(self, part: Part, size: int) -> None:
        if part == COPY:
            return
        if part.kind in DIVIDED:
            size = size // self.processes if size > 0 else -(-size // self.processes)
        self.live[part] += size
        self._total += size


def _one(dtype: torch.dtype) -> bool | int | float:
    """The number that is read from a tensor without data."""
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def without_data() -> FakeTensorMode:
    """A context in which every new tensor has a shape and no data; such tensors can be mixed with real ones after
    it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def counting(ledger: Ledger) -> Iterator[Ledger]:
    """The peak of this context, from what lives at its beginning."""
    with ledger:
        ledger.restart()
        yield ledger


def require_support() -> None:
    """Raise ImportError unless this torch counts as expected: a number read from a tensor without data is 1, a new
    tensor is counted and a freed one is not."""
    with without_data() as mode:
        weight = torch.empty(4, 8)
    with Ledger(8, mode) as ledger:
        made = weight * 2
        right = ledger.live[Part(LOGITS)] == made.nbytes == 128 and (made > 0).all().item() is True
        del made
        right = right and ledger.live[Part(LOGITS)] == 0 and ledger.peak >= 128
    if not right:
        raise ImportError(
            f"torch {torch.__version__} counts tensors without data in another way; `leash plan` needs 2.13"
        )
