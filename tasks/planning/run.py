"""What a run needs before it starts: memory, samples and tokens, seconds, disk."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from rlhf_core.config.lora import LoraSettings
from rlhf_core.errors import UserError
from rlhf_core.loading import load_config, loading
from rlhf_core.models.lora import add_lora
from rlhf_core.planning.ledger import require_support
from rlhf_core.planning.memory import Phase
from rlhf_core.planning.shapes import Shapes, parameters_of, planned_for, require_plannable, scratch_config
from rlhf_core.planning.speed import Speed, calibrate
from rlhf_core.training.checkpoints import KEPT
from tasks.datasets.raw import below_raw
from tasks.params.all import Params
from tasks.params.loader import PARAMS_FILE, parse
from tasks.params.methods import VARIANTS
from tasks.params.scorer import uses_reward_model
from tasks.params.variant import merged
from tasks.planning.changes import peak_of, savings
from tasks.planning.stages import PlannedStage, Work, longest_prompt, stages_of

USABLE = 0.95
"""Share of the device that tensors may fill; the rest is for CUDA's context and fragments. An assumption: not run on a
GPU."""
FLOAT32 = 4


def config_of(params: Any, root: Path, folder: Path | None) -> PreTrainedConfig:
    """The configuration of the base model: of its settings, of `folder`, of a folder below data/raw/, or of the hub.
    Raises UserError where there is none to read."""
    if folder is None and params.base.source == "scratch":
        return scratch_config(params.base.scratch)
    if folder is not None and not folder.is_dir():
        raise UserError(f"--model {folder}: no such folder; make it, with the config.json of the base model")
    wanted = params.base.pretrained
    local = folder or below_raw(root / "data" / "raw", wanted.model, "base.pretrained.model")
    place, revision = (local, None) if folder is not None or local.is_dir() else (wanted.model, wanted.revision)
    if isinstance(place, str) and not re.fullmatch("[0-9a-f]{40}", revision or ""):
        raise UserError(f"base.pretrained: {place} needs the full commit hash as revision, or plan with --model FOLDER")
    try:
        with loading(place):
            return load_config(place, revision, params.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"base.pretrained.model: cannot read the config.json of {place} ({reason}); without a network put it into "
            "a folder and plan with --model FOLDER"
        ) from None


def plan_run(
    content: dict[str, Any],
    root: Path,
    memory: float,
    accelerator: bool,
    folder: Path | None = None,
    prompt_tokens: int | None = None,
    file: Path = PARAMS_FILE,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The plan of a parameter file's content for a device of `memory` bytes. Bytes and seconds; None for what depends
    on data that are not here. Raises UserError for invalid parameters, and as `config_of`."""
    require_support()
    params = parse(Params, content, file=file)
    shapes = Shapes(config_of(params, root, folder), params.trust_remote_code)
    require_plannable(shapes)
    rows = params.ppo.sampler_rows or params.ppo.batch_size
    speed = calibrate(shapes, rows)
    limit = USABLE * memory
    stages: dict[str, Any] = {}
    with planned_for(accelerator):
        for stage in stages_of(params, root, prompt_tokens):
            log(f"plan: {stage.name}")
            phases = stage.phases(shapes)
            replan = _replanner(content, root, prompt_tokens, stage.name, file)
            peak = peak_of(phases)
            changes = savings(stage.name, params, peak, limit, shapes, replan) if peak > limit else []
            stages[stage.name] = _stage(phases, stage.work, speed, processes_of(params, stage.name), changes)
        parameters = _parameters(shapes, params)
    peak = max(stage["peak"] for stage in stages.values())
    return {
        "parameters": parameters,
        "prompt_tokens": prompt_tokens or longest_prompt(params),
        "stages": stages,
        "tokens_per_second": asdict(speed),
        "disk": disk_of(params, parameters),
        "peak": peak,
        "memory": memory,
        "usable": limit,
        "fits": peak <= limit,
    }


def processes_of(params: Any, stage: str) -> int:
    """Processes that share a stage's work."""
    if stage in VARIANTS:
        return int(getattr(params, stage).applied_to(params.ppo, stage).processes)
    settings = params.rejection_sft.training if stage == "rejection_sft" else getattr(params, stage)
    return int(getattr(settings, "processes", 1))


def _replanner(
    content: dict[str, Any], root: Path, prompt_tokens: int | None, name: str, file: Path
) -> Callable[[dict[str, Any]], PlannedStage]:
    def replan(change: dict[str, Any]) -> PlannedStage:
        params = parse(Params, merged(content, change), file=file)
        return next(stage for stage in stages_of(params, root, prompt_tokens) if stage.name == name)

    return replan


def _stage(phases: list[Phase], work: Work | None, speed: Speed, processes: int, changes: list[Any]) -> dict[str, Any]:
    seconds = None
    if work is not None:
        seconds = work.sampled / speed.sample + work.read / speed.read + work.trained / speed.train
    return {
        "peak": peak_of(phases),
        "phases": {
            phase.name: {
                "peak": phase.peak,
                "parts": [
                    {"kind": part.kind, "model": part.model, "bytes": size}
                    for part, size in sorted(phase.parts.items())
                    if size
                ],
            }
            for phase in phases
        },
        "work": None if work is None else asdict(work),
        "seconds": None if seconds is None else seconds / processes,
        "changes": changes,
    }


def _parameters(shapes: Shapes, params: Any) -> dict[str, int]:
    """Parameters of a language model and a scalar model (0 where there is none), and those that PPO trains in the
    policy."""
    whole = parameters_of([shapes.causal_lm()])
    scores = uses_reward_model(params.scorer) or params.ppo.needs_critic_model
    return {
        "policy": whole,
        "reward model": parameters_of([shapes.scalar_model()]) if scores else 0,
        "trained": _trained(shapes, params.ppo.lora, whole),
    }


def _trained(shapes: Shapes, lora: LoraSettings | None, whole: int) -> int:
    if lora is None:
        return whole
    model = shapes.causal_lm()
    with shapes.mode:
        add_lora(model, lora, 0)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def disk_of(params: Any, parameters: dict[str, int]) -> dict[str, int]:
    """Bytes of files in float32: models of the checkout, PPO's snapshots, DVC's cache (a copy of both), and checkpoints
    of the stage that keeps most."""
    policy, scalar, trained = (FLOAT32 * parameters[name] for name in ("policy", "reward model", "trained"))
    ppo = params.ppo
    every = ppo.snapshot_every or ppo.steps
    methods = sum(1 for name, _ in params.enabled_methods() if name != "best_of_n")
    models = policy * (3 + methods) + scalar * (
        params.reward.members + (params.reward.judge_share > 0) + ppo.has_critic
    )
    snapshots = trained * math.ceil(ppo.steps / every)
    critic = scalar * ppo.needs_critic_model
    sft = policy + 2 * (policy if params.sft.lora is None else trained)
    state = (policy + critic) + 2 * (trained + (critic if ppo.lora is None else trained * ppo.needs_critic_model))
    kept = (KEPT + 1) * max(sft, state)
    return {"models": models, "snapshots": snapshots, "cache": models + snapshots, "checkpoints": kept}
