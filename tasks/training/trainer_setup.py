"""The `Run` of a training stage, where its model is loaded, and tables of its log."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from rlhf_core.config.lora import LoraSettings
from rlhf_core.models.hf import default_device
from rlhf_core.models.precision import body_precision
from rlhf_core.training.processes import Processes
from rlhf_core.training.run import Report, Run
from tasks.stage.models import set_numerics
from tasks.stage.stage import Stage


def training_run(stage: Stage[Any], shown: Sequence[str], part: str = "", seed: int | None = None) -> Run:
    """Seed everything, and make a Run that shows `shown` and tracks every number under the stage's name.

    A further training of the stage has a name (`part`), with which its state folder and its metrics begin, and a seed
    of its own.
    """
    seed = stage.seed if seed is None else seed
    set_numerics(stage, seed)
    processes = Processes("fsdp") if "RANK" in os.environ else None
    return Run(
        state_dir=stage.state_dir / part,
        seed=seed,
        report=_reporter(stage, shown, part),
        checkpoint_every=stage.runtime.checkpoint_every,
        stopping=stage.interrupts,
        log=stage.log,
        precision=stage.precision,
        processes=processes if processes is not None and processes.divides_models else None,
    )


def place_of(run: Run, lora: LoraSettings | None) -> dict[str, Any]:
    """The options with which the trained model is loaded: a whole one straight to the device, with a frozen body in the
    run's precision; one that is divided then to the host, in float32, of which the processes take their parts."""
    if run.processes is not None:
        return {"frozen": "float32", "device": torch.device("cpu")}
    return {"frozen": body_precision(run.precision, lora), "device": default_device()}


def _reporter(stage: Stage[Any], shown: Sequence[str], part: str) -> Report:
    progress = None
    prefix = f"{part}/" if part else ""

    def report(step: int, total: int, values: dict[str, float]) -> None:
        nonlocal progress
        progress = progress or stage.progress(total)
        stage.track({f"{prefix}{name}": value for name, value in values.items()}, step)
        if "loss" in values:
            progress.update(step, **{name: values.get(name) for name in shown})

    return report


def log_table(log: Sequence[dict[str, float]], columns: dict[str, str]) -> list[dict[str, float | None]]:
    """A training's log as rows of step and renamed columns, one a step; what was not measured stays empty."""
    rows: dict[int, dict[str, float | None]] = {}
    for event in log:
        found = {new: event[old] for old, new in columns.items() if old in event}
        if found:
            row = rows.setdefault(int(event["step"]), {"step": int(event["step"])} | dict.fromkeys(columns.values()))
            row |= found
    return [rows[step] for step in sorted(rows)]


LAST = 10
"""Steps at the end of a training over which its figures are averaged: one batch is too few."""


def last_means(log: Sequence[dict[str, float]], names: Sequence[str] = ("loss",)) -> dict[str, float]:
    """The means of figures of the training batches over the last ten steps, or all where they are fewer, each with the
    prefix `train_`."""
    last = [row for row in log if "loss" in row][-LAST:]
    return {f"train_{name}": sum(row[name] for row in last) / len(last) for name in names}


def tokens_read(log: Sequence[dict[str, float]], per_epoch: int) -> int:
    """Tokens that the backward passes of a training have read, where one epoch reads `per_epoch` of them: the
    log has the number of epochs, with their fraction."""
    return round(max(event["epoch"] for event in log if "epoch" in event) * per_epoch)
