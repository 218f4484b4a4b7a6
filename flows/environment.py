"""The root of the project, and the environment variables of its processes."""

import os
from contextlib import suppress
from pathlib import Path

from rlhf_core.errors import UserError

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # seconds; a killed run is found by them
}
"""Switches telemetry off, and heartbeats on."""
PARENT_VARIABLE = "LEASH_PARENT_TASK_RUN"
"""Environment variable: the Prefect task run that the flow run of this process belongs to."""


PROFILES = Path("~/.prefect/profiles.toml")
"""The user's settings of Prefect."""


def apply_defaults() -> None:
    """Set `QUIET` where the user has set nothing, and no proxy for this machine. Call it before Prefect, DVC or MLflow
    is imported."""
    from tasks.tracking.settings import bypass_proxies

    bypass_proxies()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def use_own_prefect_home() -> None:
    """Keep Prefect's state in work/prefect of the project, unless PREFECT_HOME is set; the user's profiles of Prefect
    still hold. Call it before Prefect is imported."""
    from tasks.tracking.settings import main_checkout

    if "PREFECT_HOME" in os.environ:
        return
    with suppress(UserError, OSError):  # outside a project, or one that cannot be written
        home = main_checkout(find_root()) / "work" / "prefect"
        home.mkdir(parents=True, exist_ok=True)  # Prefect makes the last folder only
        os.environ["PREFECT_HOME"] = str(home)
        if PROFILES.expanduser().is_file():
            os.environ.setdefault("PREFECT_PROFILES_PATH", str(PROFILES.expanduser()))


def find_root(start: Path | None = None) -> Path:
    """The nearest folder with a `dvc.yaml`, from `start` (default: the current folder) upwards. Raises UserError."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "dvc.yaml").is_file():
            return folder
    raise UserError(f"{here}: no dvc.yaml here or in a folder above; change into a clone of Leash")
