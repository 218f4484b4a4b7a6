"""Several processes that train as one: who does which share of the work, and how everybody gets the whole result.

Every process holds the same weights and plans the whole batch; only sampling, scoring and passes through the models are
shared out. With one process nothing here does anything.
"""

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, distributed

from rlhf_core.errors import UserError

LOOPBACK = "127.0.0.1"
PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others before it gives up: one may load its models more slowly."""
WHOLE_MODELS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
Item = TypeVar("Item")
Result = TypeVar("Result")


class Processes:
    """The processes of this run, as `accelerate launch` (or whatever sets RANK and WORLD_SIZE) started them.

    Raises UserError where accelerate is configured to split the models themselves.
    """

    def __init__(self) -> None:
        meet_on_loopback()
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available())
        kind = self.accelerator.distributed_type
        if kind not in WHOLE_MODELS:
            raise UserError(
                f"accelerate is configured for {kind.value}: PPO keeps whole models in every process; use MULTI_GPU, "
                "and lora, gradient_checkpointing, bfloat16 or a shared critic where memory is short"
            )

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this is the one that talks and writes."""
        return bool(self.accelerator.is_main_process)

    def share(self, items: Iterable[Item]) -> list[Item]:
        """Every count-th of the items, from this process' place on."""
        return list(items)[self.accelerator.process_index :: self.count]

    def spread(self, items: Sequence[Item], work: Callable[[list[Item]], Sequence[Result]]) -> list[Result]:
        """`work` on all items, one result each in their order: each process does its share, all get all results."""
        done = list(work(self.share(items)))
        if self.count == 1:
            return done
        shares = self.gather([done])
        return [shares[row % self.count][row // self.count] for row in range(len(items))]

    def gather(self, items: list[Item]) -> list[Item]:
        """The lists of all processes, one after the other."""
        return items if self.count == 1 else list(gather_object(items))

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the processes: one exchange for all of them."""
        parts = list(tensors)
        if self.count == 1 or not parts:
            return
        total = self.accelerator.reduce(torch.cat([part.flatten() for part in parts]), reduction="sum")
        for part, piece in zip(parts, total.split([part.numel() for part in parts]), strict=True):
            part.copy_(piece.view_as(part))


def meet_on_loopback() -> None:
    """Connect processes that shall meet at 127.0.0.1 so that no other machine can reach them.

    Torch's own meeting point listens at every address of the machine, and what processes gather is unpickled: whoever
    reached it could run code here. Does nothing for one process, for another address, and where a launcher has made the
    meeting point (`accelerate launch`).
    """
    rank, count = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    launched = "TORCHELASTIC_USE_AGENT_STORE" in os.environ
    if count < 2 or launched or os.environ.get("MASTER_ADDR") != LOOPBACK or distributed.is_initialized():
        return
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", _loopback_interface())
    port = int(os.environ["MASTER_PORT"])
    listener = _listen(port) if rank == 0 else None
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, port, count, is_master=rank == 0, wait_for_workers=False, timeout=PATIENCE, master_listen_fd=listener
    )
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)


def _listen(port: int) -> int:
    """A socket at the loopback address alone, as a file descriptor that the store takes over."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((LOOPBACK, port))
    listener.listen()
    return listener.detach()


def _loopback_interface() -> str:
    """`lo` on Linux, `lo0` on a Mac."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
