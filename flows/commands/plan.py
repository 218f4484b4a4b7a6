"""`leash plan`: what a run would need, and what to change where it does not fit. Loads no weights."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from flows.text import table
from rlhf_core.errors import UserError
from tasks.params.loader import read_yaml
from tasks.planning import ANY_GPU, USABLE, plan_run

GB = 1e9
KINDS = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "key-value cache")
WORK = ("samples", "sampled", "read", "trained")
UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def plan_file(
    path: Path, root: Path, gpu_memory: float | None, model: Path | None, prompt_tokens: int | None
) -> dict[str, Any]:
    """The plan of a parameter file, for `gpu_memory` in GB or else the first GPU or this machine. Raises UserError for
    a file that is no valid parameter file, for a model without a config.json, and for no memory."""
    import torch

    if gpu_memory is not None and not 0 < gpu_memory < math.inf:
        raise UserError(f"--gpu-memory {gpu_memory:g}: must be a number above 0, in GB")
    if gpu_memory is not None:
        memory, device = gpu_memory * GB, ANY_GPU
    elif torch.cuda.is_available():
        memory, device = float(torch.cuda.get_device_properties(0).total_memory), torch.cuda.get_device_name(0)
    else:
        memory, device = float(psutil.virtual_memory().total), "cpu"
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the error says it in one line
    found = plan_run(read_yaml(path), root, memory, device, model, prompt_tokens, path)
    return {"device": "host" if device == "cpu" else "GPU", **found}


def render(plan: Mapping[str, Any]) -> str:
    """The plan as tables."""
    stages: Mapping[str, Mapping[str, Any]] = plan["stages"]
    used = {part["kind"] for one in stages.values() for phase in one["phases"].values() for part in phase["parts"]}
    kinds = [kind for kind in KINDS if kind != "gathered" or kind in used]  # gathered: where a model is divided
    memory, models = [["GB at the peak", "phase", "all", *kinds]], []
    work = [["stage", "samples", "tokens sampled", "tokens read", "tokens trained", "time", "by"]]
    changes = []
    for name, stage in stages.items():
        for phase, found in stage["phases"].items():
            sums = [sum(part["bytes"] for part in found["parts"] if part["kind"] == kind) for kind in kinds]
            mark = " *" if found["peak"] == stage["peak"] else ""
            memory.append([name, phase + mark, *map(_number, [found["peak"], *sums])])
        peak = max(stage["phases"].values(), key=lambda phase: phase["peak"])
        weights = {part["model"]: part["bytes"] for part in peak["parts"] if part["kind"] == "weights"}
        models.append(f"weights of {name}: " + ", ".join(f"{model} {_number(size)}" for model, size in weights.items()))
        counts = ["?" if stage["work"] is None else f"{stage['work'][kind]:,}" for kind in WORK]
        work.append([name, *counts, _time(stage["seconds"]), stage["time_by"]])
        if stage["changes"]:
            steps = [[f"{name}: change, in this order", "saves GB", "peak GB"]]
            for step in stage["changes"]:
                steps.append([_words(step["change"]), _number(step["saves"]), _number(step["peak"])])
            changes.append(table(steps))
    known = [stage for stage in stages.values() if stage["work"] is not None]
    sums = [f"{sum(stage['work'][kind] for stage in known):,}" for kind in WORK]
    total = _time(sum(stage["seconds"] for stage in known))
    work.append(
        ["all", *sums, total, "" if len(known) == len(stages) else "without the stages whose rows are not known"]
    )
    lengths = (
        "rows and answers of mean length"
        if plan["measured_lengths"]
        else f"the longest rows and answers: after `leash run {plan['lengths_after']}` it is of the usual ones"
    )
    speeds = ", ".join(f"{value / 1e12:.3g} in {kind}" for kind, value in plan["flops"].items())
    slow = []
    if plan["bfloat16_time"] is not None:
        slow = [
            f"precision: bfloat16 takes {plan['bfloat16_time']:.1f} times as long as float32 on this CPU; set float32"
        ]
    verb = "fits into" if plan["fits"] else "does NOT fit into"
    parts = [
        "parameters: " + ", ".join(f"{name} {count:,}" for name, count in plan["parameters"].items()),
        f"longest prompt: {plan['prompt_tokens']} tokens; memory is that of the longest rows",
        "\n".join([table(memory), "* the stage's peak", "", *models]),
        f"{table(work)}\n{_rows(plan['rows'])}\ntime of {lengths}\n"
        f"formula: TFLOP/s {'measured here' if plan['device'] == 'host' else 'assumed'}: {speeds}",
        "disk: " + ", ".join(f"{name} {_number(size)} GB" for name, size in plan["disk"].items()),
        *changes,
        *slow,
        f"peak {_number(plan['peak'])} GB: {verb} {USABLE:.0%} of {_number(plan['memory'])} GB ({plan['device']})",
    ]
    return "\n\n".join(parts)


def _words(change: Any) -> str:
    """`ppo.lora: {}` of {"ppo": {"lora": {}}}: a change has one value."""
    names = []
    while isinstance(change, Mapping) and change:
        [(name, change)] = change.items()
        names.append(name)
    return f"{'.'.join(names)}: {str(change).lower() if isinstance(change, bool) else change}"


def _rows(rows: Mapping[str, int] | None) -> str:
    if rows is None:
        return "rows: not known before the data are here"
    return "rows: " + ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in rows.items())


def _number(size: float) -> str:
    """Bytes in GB."""
    return f"{size / GB:.2f}" if size < 10 * GB else f"{size / GB:.1f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 1:
        return "below 1 second"
    unit, length = next(one for one in UNITS if seconds >= one[1])
    return f"{seconds / length:.{0 if length == 1 else 1}f} {unit}"
