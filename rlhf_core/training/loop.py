"""The training loop of pretraining, SFT, reward model, DPO and IPO. A run that is killed and started again ends in the
same bytes. The model may be divided over processes, which share the passes of every batch."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core import files
from rlhf_core.errors import NonFiniteError, UserError, is_out_of_memory
from rlhf_core.finite import at_step, require_finite
from rlhf_core.models import sharded_files
from rlhf_core.models.batching import tokens_per_pass
from rlhf_core.models.hf import default_device
from rlhf_core.models.precision import autocast
from rlhf_core.models.sharding import clip_gradients, is_divided
from rlhf_core.progress import report
from rlhf_core.training.checkpoints import Checkpoints
from rlhf_core.training.run import Run
from rlhf_core.training.state import STATE, newest, save

MAX_GRAD_NORM = 1.0
EPS = 1e-8
"""Of Adam. A larger one takes a part of the first steps of a pretrained model."""

Sums = Callable[[Sequence[int]], dict[str, Tensor]]
"""Of the items at some places: the sum of the loss, with gradient, and of other figures, over their terms."""


class Settings(Protocol):
    """Parameters that every training by epochs has."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def epochs(self) -> float: ...


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    learning_rate: float
    batch_size: int
    steps: int
    warmup_steps: int
    weight_decay: float

    @classmethod
    def of(cls, settings: Settings, items: int) -> "Schedule":
        """The schedule of `settings.epochs` passes over the items; the last batch of a pass may be smaller."""
        steps = math.ceil(settings.epochs * math.ceil(items / settings.batch_size))
        batch, warmup = settings.batch_size, settings.warmup_steps
        return cls(settings.learning_rate, batch, steps, warmup, settings.weight_decay)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: it rises from 0 over the warm-up, then falls along a cosine."""
        if step < self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


class Training:
    """A training that continues from its newest checkpoint: `while not ended: step(), …, checkpoint()`.

    Args:
        model: its parameters with gradients are trained, in place; its other weights and buffers do not change.
        sums: see `Sums`.
        weights: the terms of each item in the loss, which is a mean over all terms of a batch: tokens, or pairs.
        tokens: what a pass reads of each item.
        keys: the parameters to lower where memory is short, for the error.
        most_items: of a pass of one process.
        most_tokens: of a pass. Neither changes a result, except for rounding.
        keep: files of the caller in the state folder that belong to a checkpoint.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sums: Sums,
        weights: Sequence[int],
        tokens: Sequence[int],
        schedule: Schedule,
        run: Run,
        keys: str,
        *,
        most_items: int | None = None,
        most_tokens: int | None = None,
        keep: Sequence[Path] = (),
    ) -> None:
        if not is_divided(model) and model.device.type != default_device().type:
            model.to(default_device())
        self.model, self.sums, self.weights, self.tokens = model, sums, weights, tokens
        self.schedule, self.run, self.keys, self.keep = schedule, run, keys, keep
        share = math.ceil(schedule.batch_size / (1 if run.processes is None else run.processes.count))
        self.most_items = min(share, most_items or share)
        self.most_tokens = min(tokens_per_pass(model.device), most_tokens or tokens_per_pass(model.device))
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices = [p for p in self.trained.values() if p.ndim > 1]
        vectors = [p for p in self.trained.values() if p.ndim <= 1]  # biases and norms do not decay
        groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, eps=EPS, fused=True)
        self.checkpoints = Checkpoints(run.state_dir / "trainer", run.log)
        self.done, self.saved, self.ended = 0, 0, schedule.steps == 0
        self.log: list[dict[str, float]] = []
        self._resume()

    def batch(self, step: int) -> list[int]:
        """The places of a step's items: a random order of all of them in each epoch, by the seed."""
        epoch, place = divmod(step, math.ceil(len(self.weights) / self.schedule.batch_size))
        order = torch.randperm(len(self.weights), generator=torch.Generator().manual_seed(self.run.seed + epoch))
        return order[place * self.schedule.batch_size :][: self.schedule.batch_size].tolist()

    def step(self) -> None:
        """One step of AdamW with the gradient of the mean loss over a batch. Raises NonFiniteError, before the weights
        change, for a loss or gradient that is NaN or infinite."""
        places, processes = self.batch(self.done), self.run.processes
        terms = sum(self.weights[place] for place in places)
        passes = passes_of(places, self.tokens, self.most_items, self.most_tokens)
        mine = [(group, True) for group in passes] if processes is None else processes.share_evenly(passes)
        total: dict[str, Tensor] = {}
        for number, (group, counts) in enumerate(mine):
            report("step", self.done + number / len(mine), self.schedule.steps)
            with autocast(self.run.precision, self.model.device):
                sums = self.sums(group)
            loss = sums["loss"] * (counts / terms)
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in sums.items():
                value = value.detach().double() * counts
                total[name] = total[name] + value if name in total else value
        if processes is not None:
            processes.all_reduce(total.values())
        means = {name: value.item() / terms for name, value in total.items()}
        self._require_finite(means["loss"], "the loss")
        norm = clip_gradients(list(self.trained.values()), MAX_GRAD_NORM)
        self._require_finite(norm, "the gradient norm")
        rate = self.schedule.rate(self.done)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        self.ended = self.done == self.schedule.steps
        self.record(**means, grad_norm=norm, learning_rate=rate)

    def record(self, **values: float) -> None:
        """Add figures of the present step to the log, and report them."""
        epoch = self.done / math.ceil(len(self.weights) / self.schedule.batch_size)
        self.log.append({**values, "epoch": epoch, "step": self.done})
        self.run.report(self.done, self.schedule.steps, values)

    def checkpoint(self) -> None:
        """Save the state where it is due: every `run.checkpoint_every` steps, at the end, and before the run stops.
        Raises KeyboardInterrupt where it is to stop; NonFiniteError, and saves nothing, for weights or moments that are
        NaN or infinite."""
        run, leaving = self.run, self.run.stopping.is_requested()
        if run.processes is not None:
            leaving = run.processes.gather([leaving])[0]
        if leaving or self.ended or self.done % run.checkpoint_every == 0:
            weights = {name: p.detach() for name, p in self.trained.items()}
            optimizer = self.optimizer.state_dict()

            def check() -> None:
                with at_step(self.done):
                    require_finite(weights, "weights")
                    require_finite(optimizer, "optimizer")

            if run.processes is None:
                check()
            else:
                run.processes.together(check, (NonFiniteError,))
            state = {
                "done": self.done,
                "ended": self.ended,
                "log": self.log,
                "weights": weights,
                "optimizer": optimizer,
            }
            save(self.checkpoints, self.done, state, run.processes, self.keep)
            self.saved = self.done
        if leaving:
            raise KeyboardInterrupt

    @contextmanager
    def running(self) -> Iterator[None]:
        """In this context a request to stop waits for the next checkpoint, and lack of memory is a UserError."""
        try:
            with self.run.stopping.deferred():
                yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"out of memory at step {self.done + 1}; lower {self.keys}, which starts the training again, or free "
                f"memory: with the same parameters it continues at step {self.saved + 1}"
            ) from None

    @torch.no_grad()
    def _resume(self) -> None:
        """Continue from the newest checkpoint; kept files without one belong to no step, and are removed."""
        run = self.run
        folder = newest(self.checkpoints, run.processes)
        for path in self.keep if run.is_main else ():
            files.remove(path)
            if folder is not None and (folder / path.name).exists():
                files.link(folder / path.name, path)
        if folder is None:
            return
        state = sharded_files.read(folder / STATE, divide=run.processes is not None)
        for name, parameter in self.trained.items():
            parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = self.saved = state["done"]
        self.ended, self.log = state["ended"], state["log"]
        run.log(f"continues after step {self.done}")

    def _require_finite(self, value: float, name: str) -> None:
        if not math.isfinite(value):
            raise NonFiniteError(f"step {self.done + 1}: {name} is {value}; lower the learning rate")


def passes_of(places: Sequence[int], tokens: Sequence[int], most_items: int, most_tokens: int) -> list[list[int]]:
    """The places in groups of similar length: each of at most so many items and tokens; a longer item is alone."""
    groups: list[list[int]] = []
    size = 0
    for place in sorted(places, key=lambda place: (tokens[place], place)):
        if not groups or len(groups[-1]) == most_items or size + tokens[place] > most_tokens:
            groups.append([])
            size = 0
        groups[-1].append(place)
        size += tokens[place]
    return groups
