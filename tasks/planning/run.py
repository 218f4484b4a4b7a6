"""What a run needs before it starts: memory, samples and tokens, seconds, disk."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.errors import UserError
from rlhf_core.loading import load_config, loading
from rlhf_core.models.lora import add_lora
from rlhf_core.planning.ledger import require_support
from rlhf_core.planning.memory import Phase
from rlhf_core.planning.shapes import Shapes, parameters_of, planned_for, require_plannable, scratch_config
from rlhf_core.planning.speed import Speed, calibrate, measured_device
from rlhf_core.training.checkpoints import KEPT
from tasks.datasets.raw import below_raw
from tasks.params.all import Params
from tasks.params.loader import PARAMS_FILE, parse
from tasks.params.methods import BY_NAME, VARIANTS
from tasks.params.scorer import uses_reward_model
from tasks.params.variant import merged
from tasks.planning.changes import peak_of, savings
from tasks.planning.stages import PlannedStage, Work, longest_prompt, stages_of

USABLE = 0.95
"""Share of the device that tensors may fill; the rest is for CUDA's context and fragments. An assumption: not run on a
GPU."""
FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""


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
    speed, measured = calibrate(shapes, rows), measured_device()
    limit = USABLE * memory
    stages: dict[str, Any] = {}
    with planned_for(accelerator):
        parameters = _parameters(shapes, params)
        for stage in stages_of(params, root, prompt_tokens):
            log(f"plan: {stage.name}")
            phases = stage.phases(shapes)
            replan = _replanner(content, root, prompt_tokens, stage.name, file)
            peak = peak_of(phases)
            changes = savings(stage.name, params, peak, limit, shapes, replan) if peak > limit else []
            stages[stage.name] = _stage(phases, stage.work, speed, processes_of(params, stage.name), changes)
    peak = max(stage["peak"] for stage in stages.values())
    return {
        "parameters": parameters,
        "prompt_tokens": prompt_tokens or longest_prompt(params),
        "stages": stages,
        "tokens_per_second": asdict(speed),
        "measured_on": measured,
        "disk": disk_of(shapes, params, parameters),
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


def disk_of(shapes: Shapes, params: Any, parameters: dict[str, int]) -> dict[str, int]:
    """Bytes of files: models of the checkout in float32, PPO's snapshots, DVC's cache (a copy of both), checkpoints of
    the stage that keeps most, and their sum."""
    ppo = params.ppo
    policy, scalar, trained = (parameters[name] for name in ("policy", "reward model", "trained"))
    methods = sum(BY_NAME[name].has_model for name, _ in params.enabled_methods())
    scalars = params.reward.members + (params.reward.judge_share > 0) if uses_reward_model(params.scorer) else 0
    models = FLOAT32 * (policy * (3 + methods) + scalar * (scalars + ppo.has_critic))
    in_bfloat16 = ppo.lora is None and params.precision == "bfloat16"
    each = trained * (BFLOAT16 if in_bfloat16 else FLOAT32)
    snapshots = each * math.ceil(ppo.steps / (ppo.snapshot_every or ppo.steps))
    checkpoints = (KEPT + 1) * max(
        _trainer_checkpoint(shapes, params.precision, params.sft.lora, policy),
        _trainer_checkpoint(shapes, params.precision, params.reward.lora, scalar),
        _ppo_checkpoint(ppo, trained, scalar),
    )
    sizes = {"models": models, "snapshots": snapshots, "cache": models + snapshots, "checkpoints": checkpoints}
    return sizes | {"total": sum(sizes.values())}


def _trainer_checkpoint(shapes: Shapes, precision: Precision, lora: LoraSettings | None, whole: int) -> int:
    """Bytes of the whole model and two moments of what is trained."""
    frozen = BFLOAT16 if lora is not None and precision == "bfloat16" else FLOAT32
    return frozen * whole + 2 * FLOAT32 * _trained(shapes, lora, whole)


def _ppo_checkpoint(ppo: PPOConfig, trained: int, scalar: int) -> int:
    """Bytes of the weights that are trained (with LoRA the adapters) and their two moments."""
    critic = (scalar if ppo.lora is None else trained) * ppo.needs_critic_model
    moment = FLOAT32 if ppo.optimizer.states == "float32" else 1
    return (trained + critic) * (FLOAT32 + 2 * moment)
