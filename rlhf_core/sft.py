"""Supervised fine-tuning: loss on response tokens only, early stopping by the validation loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from rlhf_core.config.sft import SFTConfig
from rlhf_core.errors import NonFiniteError
from rlhf_core.models.hf import load_weights, save_weights, unique_weights
from rlhf_core.models.lora import Adapter, add_lora
from rlhf_core.models.precision import autocast
from rlhf_core.models.recompute import recomputing
from rlhf_core.models.sequence_logprobs import sequence_logprobs
from rlhf_core.models.sharding import divide, gathered, is_main, rejoin
from rlhf_core.training.divided import map_whole
from rlhf_core.training.processes import Processes
from rlhf_core.training.run import Run, Schedule, train, trainer_arguments
from rlhf_core.training.trainer import IGNORED, GuardedTrainer


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the response to imitate, as token ids; the response ends with the end-of-sequence token."""

    prompt: list[int]
    response: list[int]


@dataclass(frozen=True)
class SFTResult:
    """The log and the losses of a training, in nats per response token."""

    log: list[dict[str, float]]
    base_validation_loss: float
    validation_loss: float
    best_step: int
    steps: int


def fine_tune(
    model: PreTrainedModel,
    training: Sequence[Demonstration],
    validation: Sequence[Demonstration],
    config: SFTConfig,
    pad_id: int,
    run: Run,
    keys: str = "sft.micro_batch_size or sft.max_tokens",
) -> SFTResult:
    """Train `model` in place, all its weights or with `config.lora` adapters that are then merged, and leave it with
    the weights of the lowest validation loss. `keys` are what a user can lower where memory is short. With
    `run.processes` the model is divided meanwhile, and whole in the main process in the end."""
    adapter = None if config.lora is None else add_lora(model, config.lora, run.seed)  # changes no output yet
    if run.processes is not None:
        divide(model, run.precision == "bfloat16")
    with autocast(run.precision, model.device):
        base_loss = response_loss(model, validation, pad_id, config.micro_batch_size, run.processes)
    schedule = Schedule(
        learning_rate=config.learning_rate,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        epochs=config.epochs,
    )
    arguments = trainer_arguments(run, schedule, eval_strategy="steps", eval_steps=config.evaluate_every)
    best = KeepBest(run.state_dir / "best.safetensors", config.patience, adapter)
    trainer = ResponseTrainer(
        run,
        keys,
        model=model,
        args=arguments,
        train_dataset=list(training),
        eval_dataset=list(validation),
        data_collator=Collator(pad_id),
        callbacks=[best],
    )
    with recomputing([model], config.gradient_checkpointing):
        log = train(trainer, run, keep=[best.path])
    steps = trainer.state.global_step
    if not any(row.get("step") == steps and "eval_loss" in row for row in log):
        trainer.evaluate()
        log = list(trainer.state.log_history)
    step, loss = best.best_of(log)
    rejoin(model)
    if run.is_main:
        best.restore(model)
        if adapter is not None:
            adapter.merge_on_host()
    return SFTResult(log, base_loss, loss, step, steps)


@dataclass(frozen=True)
class Collator:
    """Rows padded on the right; labels only on response tokens."""

    pad_id: int

    def __call__(self, rows: Sequence[Demonstration]) -> dict[str, Tensor]:
        """input_ids, attention_mask and labels, each [rows, longest]."""
        width = max(len(row.prompt) + len(row.response) for row in rows)
        ids = torch.full((len(rows), width), self.pad_id)
        attention = torch.zeros_like(ids)
        labels = torch.full_like(ids, IGNORED)
        for i, row in enumerate(rows):
            start, end = len(row.prompt), len(row.prompt) + len(row.response)
            ids[i, :end] = torch.tensor(row.prompt + row.response)
            attention[i, :end] = 1
            labels[i, start:end] = ids[i, start:end]
        return {"input_ids": ids, "attention_mask": attention, "labels": labels}


class ResponseTrainer(GuardedTrainer):
    """A Trainer whose evaluation is the exact mean over response tokens, not a mean of batch means."""

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Measure the validation loss, log it and call the callbacks. Raises NonFiniteError where it is not finite."""
        pad_id, rows = self.data_collator.pad_id, self.halving.of(self.args.per_device_train_batch_size)
        with self.autocast():
            loss = response_loss(self.model, self.eval_dataset, pad_id, rows, self.processes)
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"step {self.state.global_step}: the validation loss is {loss}; lower the learning rate"
            )
        metrics = {"eval_loss": loss}
        self.log({"validation_loss": loss, **metrics})
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class KeepBest(TrainerCallback):
    """Saves the weights of the lowest validation loss to `path`, and stops after `patience` measurements without a
    lower one. The best step is read from the Trainer's log, which is in its checkpoints, so that a resumed run stops at
    the same step."""

    def __init__(self, path: Path, patience: int, adapter: Adapter | None = None) -> None:
        self.path, self.patience, self.adapter = path, patience, adapter

    def on_evaluate(self, args: Any, state: Any, control: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        """Save the weights if they are the best so far; stop training when `patience` is reached."""
        step, _ = self.best_of(state.log_history)
        if step == state.global_step:
            weights = gathered(unique_weights(model) if self.adapter is None else self.adapter.state_dict())
            if is_main():
                save_weights(self.path, weights)
        later = sum(1 for row in state.log_history if "eval_loss" in row and row["step"] > step)
        if self.patience and later >= self.patience:
            control.should_training_stop = True

    @staticmethod
    def best_of(log: Sequence[dict[str, float]]) -> tuple[int, float]:
        """(step, loss) of the first lowest validation loss of a log."""
        measured = [(row["eval_loss"], int(row["step"])) for row in log if "eval_loss" in row]
        loss, step = min(measured)
        return step, loss

    def restore(self, model: PreTrainedModel) -> None:
        """Load the best weights into the model."""
        load_weights(self.path, unique_weights(model))


def response_loss(
    model: PreTrainedModel,
    rows: Sequence[Demonstration],
    pad_id: int,
    batch_size: int,
    processes: Processes | None = None,
) -> float:
    """Mean negative log-likelihood of the response tokens, in nats per token over all rows; of a model that is divided
    over `processes`, or whole. NaN without rows."""

    def logprobs(part: Sequence[Demonstration]) -> list[float]:
        prompts, responses = [row.prompt for row in part], [row.response for row in part]
        return sequence_logprobs(model, prompts, responses, pad_id, batch_size)

    tokens = sum(len(row.response) for row in rows)
    return -math.fsum(map_whole(model, processes, rows, logprobs)) / tokens if tokens else math.nan
