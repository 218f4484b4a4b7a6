"""The `runtime:` block: what cannot change a result. No stage tracks it; editing it retrains nothing."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.block import Block


class ApiParams(Block):
    """Requests to the endpoint of a judge with `kind: api`."""

    concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    """Requests at the same time."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait for an answer."""
    retries: Annotated[int, Field(ge=0, le=20)] = 6
    """How often a request is repeated after 429, 5xx or a lost connection, with growing pauses."""
    max_requests: Annotated[int, Field(ge=1)] = 20_000
    """Budget of one stage: requests, repeated ones included. A pair takes two."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Budget of one stage: tokens of questions and answers, as the server counts them. null: no limit."""


class FunctionParams(Block):
    """Limits of the processes of reward functions (`scorer`). A function that reaches one stops the stage."""

    timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest time to load the file, and for a call, which has at most 64 answers."""
    memory_mb: Annotated[int, Field(ge=64)] = 4096
    """Largest address space of the process, in MiB."""


class RuntimeParams(Block):
    """Settings that cannot change a result. No stage depends on them, so an edit retrains nothing."""

    project: str | None = None
    """The name of the project on shared servers: MLflow's experiment and registered model, Prefect's flows and
    deployments. null: the last part of git's origin, else the name of the folder."""
    tracking: bool = True
    """Send parameters, metrics and artifacts to MLflow."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 20
    """Steps between two checkpoints in work/, from which a stopped stage continues."""
    progress_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Seconds between two progress lines where the output is not a terminal."""
    api: ApiParams = ApiParams()
    functions: FunctionParams = FunctionParams()
    on_alert: Literal["warn", "stop"] = "warn"
    """On an alert of PPO: `warn` reports it and goes on; `stop` ends the run. With `warn`, a stopped run
    continues from there."""

    @model_validator(mode="before")
    @classmethod
    def _no_workers(cls, values: Any) -> Any:
        if isinstance(values, dict) and "dataloader_workers" in values:
            raise ValueError("dataloader_workers has no effect any more: no stage uses a data loader; remove it")
        return values
