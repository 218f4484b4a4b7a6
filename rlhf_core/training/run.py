"""Arguments, progress, and resuming of every `transformers.Trainer`."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback

from rlhf_core import files
from rlhf_core.config.precision import Precision
from rlhf_core.errors import NonFiniteError, UserError
from rlhf_core.finite import at_step, require_finite
from rlhf_core.training.checkpoints import PREFIX, Checkpoints, Log, seal
from rlhf_core.training.processes import Processes

Report = Callable[[int, int, dict[str, float]], None]
"""Called after each step with (steps done, steps in all, values)."""


class Stopping(Protocol):
    """Whether this process was requested to stop."""

    def deferred(self) -> AbstractContextManager[None]:
        """In this context a request to stop changes only `is_requested`."""

    def is_requested(self) -> bool:
        """True after a request to stop."""


class NeverStops:
    """For a run that a signal ends at any point."""

    def deferred(self) -> AbstractContextManager[None]:
        """Changes nothing."""
        return nullcontext()

    def is_requested(self) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class Run:
    """Where a training keeps its resumable state, and settings that cannot change its result."""

    state_dir: Path
    seed: int
    report: Report
    workers: int = 0
    checkpoint_every: int = 100
    stopping: Stopping = NeverStops()  # noqa: RUF009 - it has no state
    """Read after each step; after a request to stop, a checkpoint is written and KeyboardInterrupt raised."""
    log: Log = print
    exempt: Log = print
    """Called with the reason why the run is exempt from byte identity."""
    precision: Precision = "float32"
    """Of matrix products; weights and losses are float32 in every precision."""
    processes: Processes | None = None
    """The processes over which the model is divided while it is trained; None: it is whole."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files, and has the whole model in the end."""
        return self.processes is None or self.processes.is_main


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train."""

    learning_rate: float
    batch_size: int
    micro_batch_size: int
    warmup_steps: int
    weight_decay: float
    epochs: float = 1.0
    max_steps: int = -1


def trainer_arguments(run: Run, schedule: Schedule, **extra: Any) -> TrainingArguments:
    """Arguments for a Trainer that reports to no service and writes its checkpoints to the run's state folder. Where
    the model is divided, a micro-batch has the rows of all processes."""
    rows = schedule.micro_batch_size * (1 if run.processes is None else run.processes.count)
    rows = min(rows, schedule.batch_size)
    return TrainingArguments(
        output_dir=str(run.state_dir / "trainer"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=max(1, schedule.batch_size // rows),
        num_train_epochs=schedule.epochs,
        max_steps=schedule.max_steps,
        learning_rate=schedule.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=schedule.warmup_steps,
        weight_decay=schedule.weight_decay,
        max_grad_norm=1.0,
        seed=run.seed,
        data_seed=run.seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_num_workers=run.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=run.checkpoint_every,
        report_to=[],
        disable_tqdm=True,
        **extra,
    )


def train(trainer: Trainer, run: Run, keep: Sequence[Path] = ()) -> list[dict[str, float]]:
    """Train to the end, from the last complete checkpoint of the state folder if there is one. Returns the log, a row
    for each log event.

    `keep` are files of the caller in the state folder; they are saved in each checkpoint and restored from it. Raises
    NonFiniteError instead of completing a checkpoint that is not finite, KeyboardInterrupt after a request to stop.
    """
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ReportProgress(run.report))
    trainer.add_callback(SealCheckpoints(run, keep))
    last = _last_checkpoint(run, keep)
    if last is not None:
        run.log(f"continues after step {last.name.removeprefix(PREFIX)}")
    if last is not None and _ended(state := TrainerState.load_from_json(str(last / TRAINER_STATE_NAME))):
        trainer._load_from_checkpoint(str(last))  # Trainer.train would take one more step first
        trainer.state = state
    else:
        with run.stopping.deferred():
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
    return list(trainer.state.log_history)


def _last_checkpoint(run: Run, keep: Sequence[Path]) -> Path | None:
    """The checkpoint from which the training continues, chosen by the main process, which restores the kept files. Its
    error is raised in all processes."""

    def choose() -> Path | None:
        last = Checkpoints(run.state_dir / "trainer", run.log).newest()
        _restore(keep, last)
        return last

    if run.processes is None:
        return choose()
    chosen = run.processes.together(lambda: choose() if run.is_main else None, (UserError,))
    return run.processes.gather([chosen])[0]


def _restore(keep: Sequence[Path], checkpoint: Path | None) -> None:
    """Restore the kept files from the checkpoint; remove them where there is no checkpoint."""
    for path in keep:
        files.remove(path)
        if checkpoint is not None and (checkpoint / path.name).exists():
            shutil.copyfile(checkpoint / path.name, path)


def _ended(state: TrainerState) -> bool:
    """Whether training had stopped, early or at its last step, when the checkpoint was written."""
    return bool(state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"])


class ReportProgress(TrainerCallback):
    """Passes each logged value to the run's report."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Forward the numbers of one log event."""
        values = {k: float(v) for k, v in (logs or {}).items() if isinstance(v, int | float)}
        if "loss" in values or any(key.startswith("validation") for key in values):
            self.report(state.global_step, state.max_steps, values)


class SealCheckpoints(TrainerCallback):
    """Adds the caller's files to each checkpoint of the Trainer and seals it; requests a checkpoint after a request to
    stop."""

    def __init__(self, run: Run, keep: Sequence[Path]) -> None:
        self.run, self.keep = run, keep
        self.leaving = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Request a checkpoint when the run is to stop."""
        self.leaving = self.run.stopping.is_requested()
        if self.run.processes is not None:
            self.leaving = self.run.processes.gather([self.leaving])[0]
        if self.leaving:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """Complete and seal the checkpoint. Raises NonFiniteError, and removes the checkpoint, when weights or
        optimiser hold NaN or infinity; KeyboardInterrupt when the run is to stop."""
        folder = Path(args.output_dir) / f"{PREFIX}{state.global_step}"

        def check() -> None:
            require_finite(dict(model.named_parameters()), "weights")
            require_finite(optimizer.state_dict(), "optimizer")

        try:
            with at_step(state.global_step):
                self._together(check)
        except NonFiniteError:
            if self.run.is_main:
                files.remove(folder)
            raise
        if self.run.is_main:
            self._complete(folder)
        if self.leaving:
            raise KeyboardInterrupt

    def _together(self, check: Callable[[], object]) -> None:
        """Run the check, after every process has written its part; an error in one of them is raised in all."""
        if self.run.processes is None:
            check()
        else:
            self.run.processes.together(check, (NonFiniteError,))

    def _complete(self, folder: Path) -> None:
        for path in self.keep:
            if path.exists():
                shutil.copyfile(path, folder / path.name)
        seal(folder)
        Checkpoints(folder.parent).prune()
