"""A Trainer whose model may be divided over processes (see `sharding.divide`). It trains as in one process: every
process plans every micro-batch, and they share its passes. The one module that depends on how transformers' Trainer
places, feeds, clips and saves such a model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor
from transformers import PreTrainedModel, Trainer
from transformers.trainer import SCHEDULER_NAME

from rlhf_core.models import sharded_files
from rlhf_core.models.sharding import clip_gradients, is_divided, whole
from rlhf_core.training.processes import Processes

MODEL, OPTIMIZER = "model.pt", "optimizer.pt"
"""Files of a checkpoint. A Trainer's own one of a whole model has the second name, too."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def require_hooks(kind: type, names: Sequence[str]) -> None:
    """Raise ImportError unless `kind` has every method of `names`: a guard in a renamed method would never be
    called."""
    if missing := [name for name in names if not hasattr(kind, name)]:
        raise ImportError(
            f"transformers {transformers.__version__}: {kind.__name__} has no {', '.join(missing)}, which guards "
            "training against NaN and lost checkpoints here; install a version that pyproject.toml allows"
        )


require_hooks(
    Trainer,
    (
        "_prepare_for_training", "_move_model_to_device", "_get_dataloader", "_clip_grad_norm", "_save",
        "_load_from_checkpoint", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler",
    ),
)  # fmt: skip


class DividedTrainer(Trainer):
    """A Trainer of a model that is whole (`processes` is None) or divided over `processes`."""

    def __init__(self, processes: Processes | None, **options: Any) -> None:
        self.processes = processes
        super().__init__(**options)

    @property
    def process_count(self) -> int:
        """Over which the model is divided."""
        return 1 if self.processes is None else self.processes.count

    def shared_evenly(self, items: Sequence[Item]) -> list[tuple[Item, bool]]:
        """This process' items; with False those that count nothing, see `Processes.share_evenly`."""
        return [(item, True) for item in items] if self.processes is None else self.processes.share_evenly(items)

    def sum_over_processes(self, value: Tensor) -> Tensor:
        """The sum of a tensor over the processes, without gradient."""
        if self.processes is not None:
            value = value.detach().clone()
            self.processes.all_reduce([value])
        return value

    def _prepare_for_training(self, *arguments: Any, **options: Any) -> Any:
        """No wrapper around a divided model: for a Trainer it "already owns placement and gradient reduction"."""
        self.is_distributed_loading_by_transformers = self.processes is not None
        try:
            return super()._prepare_for_training(*arguments, **options)
        finally:
            self.is_distributed_loading_by_transformers = False

    def _move_model_to_device(self, model: PreTrainedModel, device: torch.device) -> None:
        if not is_divided(model):
            super()._move_model_to_device(model, device)

    def _get_dataloader(self, *arguments: Any, **options: Any) -> Any:
        """Every process gets every row, as in one process; accelerate would divide the rows, and repeat some."""
        loader = super()._get_dataloader(*arguments, **options)
        if self.processes is not None:
            sampler = loader.batch_sampler
            if not isinstance(sampler, BatchSamplerShard):
                raise ImportError(
                    f"accelerate divides rows by {type(sampler).__name__}; use a version of constraints.txt"
                )
            sampler.num_processes, sampler.process_index, sampler.even_batches = 1, 0, False
        return loader

    def _clip_grad_norm(self, model: PreTrainedModel) -> Any:
        if self.processes is None:
            return super()._clip_grad_norm(model)
        return clip_gradients(list(model.parameters()), self.args.max_grad_norm)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.processes is None:
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        sharded_files.save(folder / MODEL, self.model.state_dict())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.processes is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        sharded_files.save(Path(output_dir) / OPTIMIZER, self.optimizer.state_dict())
        if self.processes.is_main:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        if self.processes is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self.model.load_state_dict(sharded_files.read(Path(resume_from_checkpoint) / MODEL, divide=True))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.processes is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self.optimizer.load_state_dict(sharded_files.read(Path(checkpoint) / OPTIMIZER, divide=True))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))


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
