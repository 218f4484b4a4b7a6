"""The `runtime:` block: what cannot change a result. No stage tracks it; editing it retrains nothing."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.block import Block


class ApiParams(Block):
    """Requests of a judge with `kind: api`. The budgets are per stage."""

    concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    """Parallel requests."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait for a reply."""
    retries: Annotated[int, Field(ge=0, le=20)] = 6
    """Repeats of a request after HTTP 429, 5xx or a lost connection, with growing pauses."""
    max_requests: Annotated[int, Field(ge=1)] = 20_000
    """Budget of requests, with repeats. A pair takes two."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Budget of tokens, in questions and replies, as the server counts them. null: no limit."""


class FunctionParams(Block):
    """Limits of the process of a Python function of `scorer` or `judge`. Beyond a limit, the stage stops."""

    timeout_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Longest time to load the file, and for a call with at most 64 answers."""
    memory_mb: Annotated[int, Field(ge=64)] = 4096
    """Largest address space of the process, in MiB."""


class RuntimeParams(Block):
    """Settings that cannot change a result. An edit reruns nothing."""

    project: str | None = None
    """Name of the project in MLflow and Prefect. null: the last part of git's origin, else the name of the folder."""
    tracking: bool = True
    """Log the run to MLflow."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 20
    """Training steps between checkpoints, from which a stopped stage continues."""
    progress_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Seconds between progress lines, if the output is not a terminal."""
    api: ApiParams = ApiParams()
    functions: FunctionParams = FunctionParams()
    on_alert: Literal["warn", "stop"] = "warn"
    """On an alert of PPO: report it and continue, or end the run. To continue an ended run, set `warn`."""
