"""The MLflow page of the project's own tracking database. Nothing is written here."""

import os
import sys
from pathlib import Path

from flows import server
from rlhf_core.errors import UserError


def store(root: Path) -> str:
    """Where runs are tracked: `MLFLOW_TRACKING_URI`, else the database in the project."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"


def show(root: Path, port: int) -> None:
    """Print the page's address and become `mlflow ui`; does not return. Raises UserError when the port is taken."""
    uri = store(root)
    if uri.startswith(("http://", "https://")):
        print(f"MLflow runs already at {uri} (MLFLOW_TRACKING_URI)")
        return
    if not server.is_free(port):
        raise UserError(f"port {port} is taken; stop what listens there, or choose another: leash ui --port {port + 1}")
    print(f"MLflow: http://127.0.0.1:{port} (stop with Ctrl-C)", flush=True)
    arguments = ["-m", "mlflow", "ui", "--backend-store-uri", uri, "--host", "127.0.0.1", "--port", str(port)]
    os.chdir(root)
    os.execv(sys.executable, [sys.executable, *arguments])
