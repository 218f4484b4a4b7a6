"""Data parallelism without wrappers. Every process plans the whole batch; sampling, scoring and passes through the
models are divided, and every process receives all results. The models are whole in every process, or divided, too."""

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, gather_object
from torch import Tensor, distributed
from transformers import PreTrainedModel

from rlhf_core.errors import UserError
from rlhf_core.models.sharding import any_process, whole

RENDEZVOUS = "LEASH_RENDEZVOUS"
"""The environment variable with the path of the rendezvous file of a stage's processes."""
TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others, which may load their models more slowly."""
WHOLE_MODELS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
Sharding = Literal["none", "fsdp"]
Item = TypeVar("Item")
Result = TypeVar("Result")


class Processes:
    """The processes of this run, started by the stage, by torchrun or by `accelerate launch`. `sharding` is
    `ppo.sharding`.

    Raises UserError where accelerate is configured to split the models.
    """

    def __init__(self, sharding: Sharding = "none") -> None:
        join_group()
        waits = InitProcessGroupKwargs(timeout=TIMEOUT)  # under torchrun and `accelerate launch`
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[waits])
        kind = self.accelerator.distributed_type
        if kind not in WHOLE_MODELS:
            raise UserError(
                f"accelerate is configured for {kind.value}: PPO divides its models itself; use MULTI_GPU, and "
                "ppo.sharding: fsdp where memory is short"
            )
        self.divides_models = sharding == "fsdp" and self.count > 1
        """Whether the models are divided over the processes, which then make equal numbers of passes."""

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def count(self) -> int:
        """The number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this process logs and writes files."""
        return bool(self.accelerator.is_main_process)

    def share(self, items: Iterable[Item]) -> list[Item]:
        """This process' share: every count-th item."""
        return list(items)[self.accelerator.process_index :: self.count]

    def share_evenly(self, items: Sequence[Item]) -> list[tuple[Item, bool]]:
        """This process' share, with True. Where models are divided every process gets equally many: one whose items ran
        out gets another's item, with False, for a pass that counts nothing."""
        mine = [(item, True) for item in self.share(items)]
        missing = -(-len(items) // self.count) - len(mine) if self.divides_models else 0
        return mine + [(items[0], False)] * missing

    def together(self, work: Callable[[], Result], errors: tuple[type[Exception], ...]) -> Result:
        """`work()`, without passes through models. Where they are divided, an error of these types in one process is
        raised in all of them."""
        if not self.divides_models:
            return work()
        met: Exception | None = None
        try:
            result = work()
        except errors as error:
            met = error
        if any_process(met is not None, self.device):
            raise next(error for error in self.gather([met]) if error is not None)
        return result

    def map(self, items: Sequence[Item], work: Callable[[list[Item]], Sequence[Result]]) -> list[Result]:
        """`work` on this process' share of the items; every process receives the results of all items, in their
        order."""
        done = list(work(self.share(items)))
        if self.count == 1:
            return done
        shares = self.gather([done])
        return [shares[row % self.count][row // self.count] for row in range(len(items))]

    def gather(self, items: list[Item]) -> list[Item]:
        """The concatenated lists of all processes."""
        return items if self.count == 1 else list(gather_object(items))

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the processes, with one exchange for all tensors."""
        parts = list(tensors)
        if self.count == 1 or not parts:
            return
        total = torch.cat([part.flatten() for part in parts])
        distributed.all_reduce(total)  # in place; accelerate's `reduce` makes one more copy
        pieces = torch.split(total, [part.numel() for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            part.copy_(piece.view_as(part))


def map_whole(
    model: PreTrainedModel,
    processes: Processes | None,
    items: Sequence[Item],
    work: Callable[[Sequence[Item]], Sequence[Result]],
) -> list[Result]:
    """`work(items)`, one result an item, without gradient. Where the model is divided, each process does it for its
    share of the items with the whole weights, and gets all results."""
    if processes is None:
        return list(work(items))
    with whole([model]), torch.no_grad():
        return processes.map(items, work)


def join_group() -> None:
    """Connect the processes that a stage has started, through a file that only this user can open.

    Gathered objects are unpickled, so that a connection from another machine could run code: the processes use the
    loopback interface only. Does nothing where a launcher such as `accelerate launch` or torchrun connects them.
    Raises UserError for more processes than GPUs: NCCL refuses two on one.
    """
    if RENDEZVOUS not in os.environ or distributed.is_initialized():
        return
    count, gpus = int(os.environ["WORLD_SIZE"]), torch.cuda.device_count()
    if 0 < gpus < count:
        raise UserError(
            f"processes is {count}, but torch sees {gpus} GPU{'s' * (gpus > 1)}; lower it, or make more visible "
            "(CUDA_VISIBLE_DEVICES; empty: compute on the CPU)"
        )
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", _loopback_interface())
    distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{os.environ[RENDEZVOUS]}",
        rank=int(os.environ["RANK"]),
        world_size=count,
        timeout=TIMEOUT,
    )


def _loopback_interface() -> str:
    """`lo` on Linux, `lo0` on a Mac."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
