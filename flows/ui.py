"""The MLflow page of the project's own tracking database. Nothing is written here."""

import os
import sys
from pathlib import Path

from flows import server
from rlhf_core.errors import UserError
from tasks.tracking.settings import without_credentials


def store(root: Path) -> str:
    """Where runs are tracked: `MLFLOW_TRACKING_URI`, else the database in the project."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"


def show(root: Path, port: int) -> None:
    """Print the page's address and become `mlflow ui`; does not return. Raises UserError when the port is taken."""
    uri = store(root)
    if uri.startswith(("http://", "https://")):
        print(f"MLflow runs already at {without_credentials(uri)} (MLFLOW_TRACKING_URI)")
        return
    if not server.is_free(port):
        raise UserError(f"port {port} is taken; stop what listens there, or choose another: leash ui --port {port + 1}")
    print(f"MLflow: http://127.0.0.1:{port} (stop with Ctrl-C)", flush=True)
    arguments = ["-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port)]
    os.chdir(root)
    # The address of a data base may hold a password: in the environment it stays out of the list of processes.
    os.execve(sys.executable, [sys.executable, *arguments], os.environ | {"MLFLOW_BACKEND_STORE_URI": uri})
