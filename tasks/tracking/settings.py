"""Where MLflow is, and the environment variables that shape its client. Does not import mlflow, which takes seconds."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

EXPERIMENT = "leash"
OUTCOME_VARIABLE = "LEASH_OUTCOME"
"""Environment variable: a file to which a stage appends one JSON line about how it ended. Only `leash run` sets it, and
sends what is left at its end."""
HOLD_VARIABLE = "LEASH_HOLD_TRACKING"
"""Environment variable: when set, events stay in the outbox and nothing is sent (`leash verify` works so)."""
POLICY_MODEL = "leash-policy"
POLICY_ALIAS = "current"  # `latest` is reserved by MLflow

# The client's own defaults wait 120 s for an answer and try eight times; we try again ourselves, later.
CLIENT_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
}


def prepare_environment() -> None:
    """Short time-outs and no noise for MLflow's client, where the user has not chosen otherwise."""
    for name, value in CLIENT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def is_held_back() -> bool:
    """Whether nothing may be sent to MLflow."""
    return bool(os.environ.get(HOLD_VARIABLE))


def has_driver() -> bool:
    """Whether `leash run` has started this stage."""
    return bool(os.environ.get(OUTCOME_VARIABLE))


def tracking_uri(root: Path) -> str:
    """The address to send to: `MLFLOW_TRACKING_URI`, else the SQLite file of the repository at `root`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root.resolve() / 'mlflow.db'}"


def artifact_location(root: Path, uri: str) -> str | None:
    """Where the experiment keeps artifacts: beside a data base of ours; a server decides for itself."""
    if urlsplit(uri).scheme in ("http", "https", "databricks"):
        return None
    return (root.resolve() / "mlartifacts").as_uri()


def without_credentials(text: str) -> str:
    """`text` with user names and passwords cut out of every address, and queries with them."""
    return re.sub(r"://[^/\s]*@", "://", re.sub(r"(://[^\s?]+)\?\S+", r"\1", text))


def uri_mark(uri: str) -> str:
    """A name for an address that tells it from others without giving its credentials away."""
    return hashlib.sha256(uri.encode()).hexdigest()[:16]


def workspace_id(root: Path) -> str:
    """A name for this checkout on this machine: locks cannot guard a run against another one's processes."""
    return hashlib.sha256(f"{socket.gethostname()}:{root.resolve()}".encode()).hexdigest()[:12]
