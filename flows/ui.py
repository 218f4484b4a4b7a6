"""The MLflow page of the project's own tracking database. Nothing is written here."""

import os
import sys
from pathlib import Path

from flows import server
from rlhf_core.errors import UserError
from tasks.tracking import settings

RUNS = "/#/experiments/{}/runs?workflowType=machine_learning"
"""The page of an experiment's training runs; without it MLflow opens on one for chat traces."""


def show(root: Path, port: int) -> None:
    """Print the page's address and become `mlflow ui`; does not return. Raises UserError when the port is taken."""
    uri = settings.tracking_uri(root)
    if uri.startswith(("http://", "https://")):
        print(f"MLflow runs already at {settings.without_credentials(uri)} (MLFLOW_TRACKING_URI)")
        return
    if not server.is_free(port):
        raise UserError(f"port {port} is taken; stop what listens there, or choose another: leash ui --port {port + 1}")
    experiment = _experiment(uri)
    page = f"http://127.0.0.1:{port}{RUNS.format(experiment) if experiment else ''}"
    print(f"MLflow: {page}  (there in half a minute; stop with Ctrl-C)", flush=True)
    arguments = ["-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port)]
    os.chdir(root)
    # The address of a data base may hold a password: in the environment it stays out of the list of processes.
    os.execve(sys.executable, [sys.executable, *arguments], os.environ | {"MLFLOW_BACKEND_STORE_URI": uri})


def _experiment(uri: str) -> str | None:
    """The id of the project's experiment; None where nothing has been tracked yet, or the data base does not answer."""
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        return None
    settings.prepare_environment()
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        found = MlflowClient(uri, registry_uri=uri).get_experiment_by_name(settings.EXPERIMENT)
    except MlflowException:
        return None
    return None if found is None else str(found.experiment_id)
