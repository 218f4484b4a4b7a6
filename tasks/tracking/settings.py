"""MLflow's address and the environment variables of its client. Does not import mlflow, which takes seconds."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass
from uuid import uuid4

from rlhf_core.files import atomic
from rlhf_core.locks import held

OUTCOME_VARIABLE = "LEASH_OUTCOME"
"""Environment variable set by `leash run`: a file to which a stage appends one JSON line with its outcome."""
HOLD_VARIABLE = "LEASH_HOLD_TRACKING"
"""Environment variable set by `leash verify`: records stay in the workspace and are not sent."""
RUN_VARIABLE = "LEASH_RUN"
"""Environment variable of an isolated run: its name, which is also that of its DVC experiment."""
STUDY_VARIABLE = "LEASH_STUDY"
"""Environment variable of a trial: the `study_label` of its study."""
CHECKOUT_ID = Path("work") / "checkout-id"
OUT_TAG = "leash.out."
"""Beginning of a tag of a stage's run: DVC's hash of the output with the path that follows."""
POLICY_ALIAS = "current"  # `latest` is reserved by MLflow
CONNECT_SECONDS = 5.0

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# The client's defaults retry seven times. Slow servers are waited for: it is never the training that waits.
CLIENT_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "300",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
}


def prepare_environment() -> None:
    """Set time-outs and no output for MLflow's client, unless the user has set these variables."""
    bypass_proxies()
    for name, value in CLIENT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def bypass_proxies() -> None:
    """Reach servers of this machine without a proxy, here and in the processes that start later."""
    for name in ("no_proxy", "NO_PROXY"):  # some libraries read one, some the other
        known = os.environ.get(name) or os.environ.get(name.swapcase()) or ""
        hosts = [host.strip() for host in known.split(",") if host.strip()]
        if "*" not in hosts:
            os.environ[name] = ",".join([*hosts, *(host for host in LOOPBACK if host not in hosts)])


def main_checkout(root: Path) -> Path:
    """The checkout that the workspace at `root` was made from, as a git worktree or by `dvc exp run --temp`: runs of
    all workspaces are tracked there. `root` itself where it is no such workspace, or while records are held back."""
    if os.environ.get(HOLD_VARIABLE):
        return root
    before, inside, _ = str(root.resolve()).partition("/.dvc/tmp/exps/")
    home = Path(before) if inside else _of_worktree(root)
    return home if home is not None and (home / "dvc.yaml").is_file() else root


def _of_worktree(root: Path) -> Path | None:
    """The folder whose .git a worktree shares: its own .git is a file `gitdir: HOME/.git/worktrees/NAME`."""
    link = root / ".git"
    if not link.is_file():
        return None
    folder = root / link.read_text(encoding="utf-8", errors="replace").strip().removeprefix("gitdir: ")
    return folder.resolve().parents[2] if folder.parent.name == "worktrees" else None


def tracking_uri(root: Path) -> str:
    """The address to send to: `MLFLOW_TRACKING_URI`, else the SQLite file of the main checkout of `root`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{main_checkout(root).resolve() / 'mlflow.db'}"


def registry_uri(root: Path) -> str:
    """The address of the registered policy: `MLFLOW_REGISTRY_URI`, else that of the runs."""
    return os.environ.get("MLFLOW_REGISTRY_URI") or tracking_uri(root)


def unreachable(uri: str) -> str:
    """Why nothing listens at an HTTP address, after at most CONNECT_SECONDS; empty where something does, where a proxy
    stands between, and for other addresses."""
    parts = urlsplit(uri)
    proxied = parts.scheme in getproxies() and not proxy_bypass(parts.hostname or "")
    if parts.scheme not in ("http", "https") or proxied:
        return ""
    try:
        place = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        socket.create_connection(place, timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def page_of(uri: str, experiment: str, run: str) -> str:
    """The address of the page of a run in MLflow; empty where that is no server."""
    is_server = uri.startswith(("http://", "https://"))
    return f"{without_credentials(uri).rstrip('/')}/#/experiments/{experiment}/runs/{run}" if is_server else ""


def artifact_location(root: Path, uri: str) -> str | None:
    """The experiment's artifact folder beside a local database; None for a server, which has its own."""
    if urlsplit(uri).scheme in ("http", "https", "databricks"):
        return None
    return (main_checkout(root).resolve() / "mlartifacts").as_uri()


def without_credentials(text: str) -> str:
    """`text` without the user names, passwords and queries of addresses."""
    return re.sub(r"://[^/\s]*@", "://", re.sub(r"(://[^\s?]+)\?\S+", r"\1", text))


def uri_mark(uri: str) -> str:
    """A hash of an address, which does not reveal its credentials."""
    return hashlib.sha256(uri.encode()).hexdigest()[:16]


def workspace_id(root: Path) -> str:
    """A name for this workspace on any machine that has it, and for no other: a Slurm job may continue on another node,
    and another user's clone may have the same path on another machine."""
    return hashlib.sha256(f"{checkout_id(root)} {root.resolve()}".encode()).hexdigest()[:12]


def checkout_id(root: Path) -> str:
    """A random name for the checkout, kept in it."""
    place = main_checkout(root) / CHECKOUT_ID
    with held(place.with_suffix(".lock"), 60.0, "names this checkout"):
        if not place.is_file():
            with atomic(place) as fresh:
                fresh.write_text(uuid4().hex, encoding="utf-8")
    return place.read_text(encoding="utf-8")


def study_label(root: Path, name: str) -> str:
    """The name of a study in this checkout, and what tells it from studies of this name in others."""
    return f"{name} {checkout_id(root)[:12]}"


def name_of_study(label: str) -> str:
    """The name in a `study_label`."""
    return label.split(" ")[0]
