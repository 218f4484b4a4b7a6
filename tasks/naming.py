"""The project's name, which every name on a shared server carries: experiment, registered model, flows, deployments,
automations."""

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE, read_yaml
from tasks.tracking.settings import main_checkout

NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def project_name(root: Path) -> str:
    """`runtime.project` of params.yaml; else the last part of the address of git's origin, without `.git`; else the
    name of the folder. Of letters, digits, dots, dashes and underscores; at most 60 characters."""
    home = main_checkout(root).resolve()
    named = _in_params(root) or _of_origin(home) or home.name
    return NOT_IN_NAMES.sub("-", named).strip("-.")[:60] or "leash"


def experiment_name(root: Path) -> str:
    """The experiment of the project in MLflow: `MLFLOW_EXPERIMENT_NAME`, else the project's name."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or project_name(root)


def model_name(root: Path) -> str:
    """The registered model of the project in MLflow."""
    return f"{project_name(root)}-policy"


def _in_params(root: Path) -> str:
    with suppress(UserError, AttributeError):
        return str((read_yaml(root / PARAMS_FILE).get("runtime") or {}).get("project") or "")
    return ""


def _of_origin(root: Path) -> str:
    command, origin = ["git", "config", "--get", "remote.origin.url"], ""
    with suppress(FileNotFoundError):  # no git on this machine
        origin = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    return re.split(r"[/:\\]", origin.rstrip("/"))[-1].removesuffix(".git")
