"""`leash plan`: what a run would need, and what to change where it does not fit. Loads no weights."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from flows.text import dotted, table
from rlhf_core.errors import UserError
from tasks.params.loader import read_yaml
from tasks.planning.run import USABLE, plan_run

GB = 1e9


def device_memory() -> tuple[float, str]:
    """Bytes of the first GPU, or else of this machine, and which it is."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory), "GPU"
    return float(psutil.virtual_memory().total), "host"


def plan_file(
    path: Path, root: Path, gpu_memory: float | None, model: Path | None, prompt_tokens: int | None
) -> dict[str, Any]:
    """The plan of a parameter file; progress goes to stderr. Raises UserError for a file that is no valid parameter
    file, for a model without a config.json, and for no memory."""
    if gpu_memory is not None and gpu_memory <= 0:
        raise UserError(f"--gpu-memory {gpu_memory:g}: must be above 0, in GB")
    memory, device = (gpu_memory * GB, "GPU") if gpu_memory is not None else device_memory()

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the error says it in one line

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found = plan_run(read_yaml(path), root, memory, device == "GPU", model, prompt_tokens, path, log)
    return {"device": device, **found}


def render(plan: Mapping[str, Any]) -> str:
    """The plan as tables."""
    parameters = ", ".join(f"{name} {count:,}" for name, count in plan["parameters"].items())
    disk = ", ".join(f"{name} {_gb(size)}" for name, size in plan["disk"].items())
    parts = [
        f"parameters: {parameters}",
        f"longest prompt: {plan['prompt_tokens']} tokens; every row is planned at its longest",
        _memory(plan["stages"]),
        _work(plan["stages"], plan["measured_on"]),
        f"disk: {disk}",
        *(_changes(name, stage) for name, stage in plan["stages"].items() if stage["changes"]),
        _verdict(plan),
    ]
    return "\n\n".join(parts)


def _memory(stages: Mapping[str, Any]) -> str:
    kinds = ["weights", "gradients", "optimizer", "gathered", "activations", "logits", "key-value cache"]
    if "gathered" not in {part["kind"] for part in _parts(stages)}:  # no model is divided
        kinds.remove("gathered")
    rows = [["GB at the peak", "phase", "all", *kinds]]
    for name, stage in stages.items():
        for phase, found in stage["phases"].items():
            sums = [sum(part["bytes"] for part in found["parts"] if part["kind"] == kind) for kind in kinds]
            mark = " *" if found["peak"] == stage["peak"] else ""
            rows.append([name, phase + mark, *map(_number, [found["peak"], *sums])])
    weights = [f"weights of {name}: {_models(stage)}" for name, stage in stages.items()]
    return "\n".join([table(rows), "* the stage's peak", "", *weights])


def _models(stage: Mapping[str, Any]) -> str:
    """The weights of each model at the stage's peak, in GB."""
    phase = max(stage["phases"].values(), key=lambda phase: phase["peak"])
    sizes = {part["model"]: part["bytes"] for part in phase["parts"] if part["kind"] == "weights"}
    return ", ".join(f"{model} {_number(size)}" for model, size in sizes.items())


def _parts(stages: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [part for stage in stages.values() for phase in stage["phases"].values() for part in phase["parts"]]


def _work(stages: Mapping[str, Any], measured_on: str) -> str:
    rows = [["stage", "samples", "tokens sampled", "tokens read", "tokens trained", "time"]]
    for name, stage in stages.items():
        work = stage["work"]
        cells = (
            ["after ingest"] * 4
            if work is None
            else [f"{work[k]:,}" for k in ("samples", "sampled", "read", "trained")]
        )
        rows.append([name, *cells, _time(stage["seconds"])])
    return table(rows) + f"\nevery row at its longest; time by the speed of {measured_on} in float32"


def _changes(name: str, stage: Mapping[str, Any]) -> str:
    rows = [[f"{name}: change, in this order", "saves GB", "peak GB"]]
    for step in stage["changes"]:
        keys = ", ".join(f"{key}: {_value(value)}" for key, value in _leaves(step["change"]).items())
        rows.append([keys, _number(step["saves"]), _number(step["peak"])])
    return table(rows)


def _leaves(change: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys; an empty block stays a key."""
    return dotted({k: _marked(v) for k, v in change.items()})


def _marked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _marked(v) for k, v in value.items()} or "{}"
    return value


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _verdict(plan: Mapping[str, Any]) -> str:
    share, verb = f"{USABLE:.0%} of {_gb(plan['memory'])} ({plan['device']})", "fits into"
    if not plan["fits"]:
        verb = "does NOT fit into"
    return f"peak {_gb(plan['peak'])}: {verb} {share}"


def _number(size: float) -> str:
    return f"{size / GB:.2f}" if size < 10 * GB else f"{size / GB:.1f}"


def _gb(size: float) -> str:
    return f"{_number(size)} GB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "after ingest"
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"
