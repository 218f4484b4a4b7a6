"""The `runtime:` block: what cannot change a result. No stage tracks it; editing it retrains nothing."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.block import Block


class RuntimeParams(Block):
    """Knobs of comfort and speed."""

    tracking: bool = True
    """Send parameters, metrics and artifacts to MLflow."""
    dataloader_workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes that prepare batches, where a Trainer trains (all but PPO and its variants); 0: none."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 20
    """Steps between two resumable checkpoints in work/."""
    progress_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Seconds between two progress lines where there is no terminal."""
    on_alert: Literal["warn", "stop"] = "warn"
    """What an alert of `ppo.health` does: nothing more than to be told, or end the run; `warn` then continues it from
    there."""
