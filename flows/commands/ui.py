"""`leash ui`: the MLflow page of the project's own tracking database."""

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from flows import server
from rlhf_core.errors import UserError
from tasks.naming import experiment_name
from tasks.tracking import settings

RUNS_PAGE = "/#/experiments/{}/runs?workflowType=machine_learning"
"""The page of an experiment's training runs; MLflow's default page shows chat traces."""


def show(root: Path, port: int) -> None:
    """Print the page's address and replace this process by `mlflow ui`. Raises UserError when the port is in use."""
    uri = settings.tracking_uri(root)
    if uri.startswith(("http://", "https://")):
        print(f"MLflow already runs at {settings.without_credentials(uri)} (MLFLOW_TRACKING_URI)")
        return
    if not server.is_free(port):
        raise UserError(
            f"port {port} is in use; stop what listens there, or choose another: leash ui --port {port + 1}"
        )
    experiment = _experiment(root, uri)
    page = f"http://127.0.0.1:{port}{RUNS_PAGE.format(experiment) if experiment else ''}"
    print(f"MLflow: {page}  (ready in half a minute; stop with Ctrl-C)", flush=True)
    arguments = ["-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port)]
    os.chdir(root)
    # The address of a database may hold a password: in the environment it is not in the list of processes.
    os.execve(sys.executable, [sys.executable, *arguments], os.environ | {"MLFLOW_BACKEND_STORE_URI": uri})


def _experiment(root: Path, uri: str) -> str | None:
    """The id of the project's experiment in its own SQLite database; None where nothing has been tracked yet, where it
    does not open (MLflow prints why when it starts), or where it is on a server, which could take minutes."""
    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or not path.is_file():
        return None
    query = "SELECT experiment_id FROM experiments WHERE name = ?"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
            found = base.execute(query, (experiment_name(root),)).fetchone()
    except sqlite3.Error:
        return None
    return None if found is None else str(found[0])
