"""Changes of parameters that need less memory, in the order in which they are tried: the precision, what changes
no result, and then what is another training (adapters, a shared critic, fewer rows per optimizer step)."""

from collections.abc import Callable, Iterator
from typing import Any

from rlhf_core.errors import UserError
from rlhf_core.planning.memory import Phase
from rlhf_core.planning.shapes import Shapes
from tasks.params.methods import VARIANTS
from tasks.params.variant import merged
from tasks.planning.stages import PlannedStage, longest_prompt

Values = dict[str, Any]
Replan = Callable[[Values], PlannedStage]
"""The stage with other parameters. Raises UserError for parameters that do not fit together."""

SHARE = 0.01
"""A change that saves a smaller share of the peak is left out."""


def peak_of(phases: list[Phase]) -> int:
    """The highest peak of the phases, in bytes."""
    return max(phase.peak for phase in phases)


def changes_of(stage: str, params: Any) -> Iterator[Values]:
    """Parameters to change for one stage, each beside those before it."""
    block = "ppo" if stage in VARIANTS else stage
    yield {"precision": "bfloat16"}
    if block == "ppo":
        config = params.ppo
        whole = longest_prompt(params) + config.max_new_tokens
        tokens = min(config.micro_batch_tokens or config.micro_batch_size * whole, config.micro_batch_size * whole)
        if config.processes > 1:
            yield {"ppo": {"sharding": "fsdp"}}
        yield {"ppo": {"gradient_checkpointing": True}}
        for part in (4, 16):
            yield {"ppo": {"micro_batch_tokens": max(1, tokens // part)}}
        yield {"ppo": {"sampler_rows": max(1, (config.sampler_rows or config.batch_size) // 4)}}
        yield {"ppo": {"lora": {}}}
        yield {"ppo": {"critic": {"kind": "shared"}}}
        return
    settings = params.rejection_sft.training if block == "rejection_sft" else getattr(params, block)
    processes = getattr(settings, "processes", params.ppo.processes)
    if processes < params.ppo.processes:
        yield _within(block, {"processes": params.ppo.processes})
    if "gradient_checkpointing" in type(settings).model_fields:
        yield _within(block, {"gradient_checkpointing": True})
    micro = hasattr(settings, "micro_batch_size")
    lora: list[Values] = [{"lora": {}}] if "lora" in type(settings).model_fields else []
    size = "micro_batch_size" if micro else "batch_size"
    rows = [{size: getattr(settings, size) // part} for part in (4, 16) if getattr(settings, size) % part == 0]
    for change in rows + lora if micro else lora + rows:
        yield _within(block, change)


def _within(block: str, change: Values) -> Values:
    return {"rejection_sft": {"training": change}} if block == "rejection_sft" else {block: change}


def savings(stage: str, params: Any, peak: int, limit: float, shapes: Shapes, replan: Replan) -> list[Values]:
    """Changes that bring the peak of a stage below `limit` bytes, or as near as they can: each with the bytes it saves
    beside those before it, and the peak after it. A stage is planned again with each."""
    found: list[Values] = []
    together: Values = {}
    for change in changes_of(stage, params):
        if peak <= limit:
            break
        try:
            after = peak_of(replan(merged(together, change)).phases(shapes))
        except UserError:
            continue
        if peak - after >= SHARE * peak:
            found.append({"change": change, "saves": peak - after, "peak": after})
            together, peak = merged(together, change), after
    return found
