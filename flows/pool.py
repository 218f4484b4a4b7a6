"""Trials on the workers of a Prefect work pool: flow runs, submitted again when their worker is lost."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flows import automations, isolated, processes, remote, server, workspace
from flows.deployments import HOME_VARIABLE, ORIGIN, trial
from rlhf_core.errors import UserError
from tasks.tracking.settings import without_credentials

POLL_SECONDS = 2.0
ATTEMPTS = 3
"""How often a trial is submitted whose worker is lost."""


class TrialFailed(Exception):
    """A flow run of a trial ended without its experiment; a loss of its worker is not one, until the last attempt."""


@dataclass(frozen=True)
class Pool:
    """The deployment of the trials in one work pool."""

    home: Path
    name: str
    deployment: str

    def run(
        self, trial_name: str, commit: str, overrides: tuple[str, ...], study: str, options: tuple[str, ...],
        on_line: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Submit the trial and wait until its experiment is here. Raises TrialFailed, UserError and processes.Stopped;
        then the flow run is cancelled."""
        parameters = {"name": trial_name, "commit": commit, "overrides": list(overrides), "study": study,
                      "options": list(options)}  # fmt: skip
        left = ATTEMPTS
        for attempt in range(1000):
            key = f"{study}/{trial_name}/{commit}/{attempt}"
            state, is_new = self._follow(parameters, key, on_line)
            if state.is_completed():
                if isolated.fetch(self.home, ORIGIN, commit, trial_name) is not None:
                    return
                if is_new:
                    raise TrialFailed(f"its flow run is Completed, but {ORIGIN} has no experiment {trial_name}")
            left -= is_new
            if is_new and (not state.is_crashed() or not left):
                raise TrialFailed(f"{state.name}: {state.message or 'no message'}")
            if is_new:
                on_line(f"its worker was lost ({state.message or state.name}); submitted again")

    def _follow(self, parameters: dict[str, Any], key: str, on_line: Callable[[str], None]) -> tuple[Any, bool]:
        """The final state of the flow run with this key, and whether it ended just now; an earlier process may have
        submitted it."""
        from prefect.client.orchestration import get_client
        from prefect.deployments import run_deployment
        from prefect.states import Cancelling

        run = run_deployment(
            self.deployment, parameters=parameters, timeout=0, idempotency_key=key, flow_run_name=parameters["name"],
            as_subflow=False,
        )  # fmt: skip
        assert not hasattr(run, "__await__")
        if run.state is not None and run.state.is_final():
            return run.state, False
        shown = ""
        with get_client(sync_client=True) as client:
            while True:
                state = client.read_flow_run(run.id).state
                if state is not None and state.is_final():
                    return state, True
                if state is not None and state.name != shown:
                    shown = state.name or ""
                    on_line(f"{shown.lower()} in pool {self.name}")
                try:
                    processes.raise_if_stopped()
                except processes.Stopped:
                    client.set_flow_run_state(run.id, Cancelling(), force=True)
                    raise
                time.sleep(POLL_SECONDS)


def connect(home: Path, name: str, commit: str) -> Pool:
    """Use the configured Prefect server; register the deployment of the trials and the automations there.

    Raises UserError without a server, a work pool of this name, a DVC remote, or a git remote that has the commit.
    """
    from prefect.deployments.runner import RunnerDeployment
    from prefect.exceptions import ObjectNotFound
    from prefect.types.entrypoint import EntrypointType

    server.use(_server(home))
    _require_remotes(home)
    if not workspace.git(home, "branch", "--remotes", "--contains", commit).strip():
        raise UserError(f"no branch of a git remote has commit {commit[:12]}; `git push` it, so that workers find it")
    automations.install()
    made = trial.to_deployment(name=name, work_pool_name=name, entrypoint_type=EntrypointType.MODULE_PATH)
    assert isinstance(made, RunnerDeployment)
    try:
        made.apply()
    except (ObjectNotFound, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"work pool {name}: {reason}; a first worker makes it: `leash worker {name}`") from None
    return Pool(home, name, f"trial/{name}")


def work(home: Path, name: str, limit: int) -> NoReturn:
    """Replace this process by a Prefect worker of the pool, which is made where there is none; its runs work in the
    clone at `home`. Raises UserError without a server or the remotes."""
    url = _server(home)
    _require_remotes(home)
    variables = {HOME_VARIABLE: str(home), "PREFECT_API_URL": url}
    words = ["worker", "start", "--pool", name, "--type", "process", "--limit", str(limit)]
    print(f"worker of pool {name} at {without_credentials(url)}, in {home}; stop with Ctrl-C", flush=True)
    os.execve(sys.executable, [sys.executable, "-m", "prefect", *words], os.environ | variables)


def _server(home: Path) -> str:
    url = server.configured_url(home)
    if url is None:
        raise UserError("no Prefect server is configured; set PREFECT_API_URL to one that all machines reach")
    if not server.answers(url):
        raise UserError(
            f"no Prefect server answers at {without_credentials(url)}; start it, or correct PREFECT_API_URL"
        )
    return url


def _require_remotes(home: Path) -> None:
    """Raise UserError without a git remote or a default DVC remote."""
    if ORIGIN not in workspace.git(home, "remote").split():
        raise UserError(f"workers need a git remote named {ORIGIN}: `git remote add {ORIGIN} URL`")
    remote.require(home, pull=False, push=True)
