"""What every `transformers.Trainer` of the project shares: arguments, progress, resume, and stopping at a NaN.

PPO does not stand here: it has a loop of its own in `rlhf_core/ppo/`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback

from rlhf_core.errors import NonFiniteError

Report = Callable[[int, int, dict[str, float]], None]
"""Called after each step with (steps done, steps in all, values)."""


@dataclass(frozen=True)
class Run:
    """Where a training keeps its resumable state, and what of it cannot change the result."""

    state_dir: Path
    seed: int
    report: Report
    workers: int = 0
    checkpoint_every: int = 100


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
    """Arguments for a Trainer that reports to nobody and keeps its last two checkpoints in the run's state folder."""
    return TrainingArguments(
        output_dir=str(run.state_dir / "trainer"),
        per_device_train_batch_size=schedule.micro_batch_size,
        gradient_accumulation_steps=max(1, schedule.batch_size // schedule.micro_batch_size),
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
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        **extra,
    )


def train(trainer: Trainer, run: Run) -> list[dict[str, float]]:
    """Train to the end, from the last whole checkpoint of the state folder if there is one. Returns the log, a row a
    log event."""
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ReportProgress(run.report))
    trainer.add_callback(StopAtNaN())
    last = last_checkpoint(run.state_dir / "trainer")
    if last is not None and _ended(state := TrainerState.load_from_json(str(last / TRAINER_STATE_NAME))):
        trainer._load_from_checkpoint(str(last))  # Trainer.train would take one more step before it sees the end
        trainer.state = state
    else:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    return list(trainer.state.log_history)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written whole: the Trainer writes its state last."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return next((path for path in reversed(found) if _is_json(path / TRAINER_STATE_NAME)), None)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _ended(state: TrainerState) -> bool:
    """Whether training had stopped, early or at its last step, when the checkpoint was written."""
    return bool(state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"])


class ReportProgress(TrainerCallback):
    """Hands each logged value to the caller's report."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Forward the numbers of one log event."""
        values = {k: float(v) for k, v in (logs or {}).items() if isinstance(v, int | float)}
        if "loss" in values or any(key.startswith("validation") for key in values):
            self.report(state.global_step, state.max_steps, values)


class StopAtNaN(TrainerCallback):
    """A loss that is not finite ends the run at once, before a checkpoint with it is written."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Raise NonFiniteError at the first loss that is NaN or infinite."""
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {state.global_step}: the loss is {loss}; lower the learning rate")
