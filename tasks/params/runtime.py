"""The `runtime:` block: what cannot change a result. No stage tracks it; editing it retrains nothing."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.block import Block


class RuntimeParams(Block):
    """Settings that cannot change a result. No stage depends on them, so an edit retrains nothing."""

    tracking: bool = True
    """Send parameters, metrics and artifacts to MLflow."""
    dataloader_workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes that prepare batches in the stages that use a Trainer (all but PPO and its variants); 0: none."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 20
    """Steps between two checkpoints in work/, from which a stopped stage continues."""
    progress_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Seconds between two progress lines where the output is not a terminal."""
    on_alert: Literal["warn", "stop"] = "warn"
    """On an alert of `ppo.health`: `warn` reports it and goes on; `stop` ends the run. With `warn`, a stopped run
    continues from there."""
