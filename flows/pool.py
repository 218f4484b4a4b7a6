"""Trials on the workers of a Prefect work pool: flow runs, submitted again when their worker is lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import cast

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Pending
from prefect.types.entrypoint import EntrypointType

from flows import automations, isolated, processes, remote, server, workspace
from flows.deployments import ORIGIN, trial
from flows.environment import QUIET
from rlhf_core.errors import UserError
from tasks.naming import project_name
from tasks.tracking.settings import name_of_study

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
        name = name_of_study(study)
        parameters = {"name": trial_name, "commit": commit, "overrides": list(overrides), "study": study,
                      "options": list(options)}  # fmt: skip
        lost = 0
        for attempt in count():
            submitted = run_deployment(  # or find what an earlier process has submitted with this key
                self.deployment, parameters=parameters, timeout=0, flow_run_name=trial_name, as_subflow=False,
                idempotency_key=f"{name}/{trial_name}/{commit}/{attempt}", tags=[f"study {name}"],
            )  # fmt: skip
            run = cast("FlowRun", submitted)
            state = run.state or Pending()
            was_over, shown = state.is_final(), ""
            with get_client(sync_client=True) as client:
                while not state.is_final():
                    if state.name != shown:
                        shown = str(state.name)
                        on_line(f"{shown.lower()} in pool {self.name}")
                    try:
                        processes.raise_if_stopped()
                    except processes.Stopped:
                        client.set_flow_run_state(run.id, Cancelling(), force=True)
                        raise
                    time.sleep(POLL_SECONDS)
                    state = client.read_flow_run(run.id).state or state
            if state.is_completed() and isolated.fetch(self.home, ORIGIN, commit, trial_name) is not None:
                return
            if was_over:
                continue
            lost += state.is_crashed()
            if state.is_completed():
                raise TrialFailed(f"its flow run is Completed, but {ORIGIN} has no experiment {trial_name}")
            if not state.is_crashed() or lost == ATTEMPTS:
                raise TrialFailed(f"{state.name}: {state.message or 'no message'}")
            on_line(f"its worker was lost ({state.message or state.name}); submitted again")


def connect(home: Path, name: str, commit: str) -> Pool:
    """Use the configured Prefect server, and register the deployment of the trials there. Prints a warning where the
    server does not notice that a worker is lost.

    Raises UserError without a server, a work pool of this name, a DVC remote, or a git remote that has the commit.
    """
    server.require(home)
    if ORIGIN not in workspace.git(home, "remote").split():
        raise UserError(f"workers need a git remote named {ORIGIN}: `git remote add {ORIGIN} URL`")
    remote.require(home, pull=False, push=True)
    if not workspace.git(home, "branch", "--remotes", "--contains", commit).strip():
        raise UserError(f"no branch of a git remote has commit {commit[:12]}; `git push` it, so that workers find it")
    project = project_name(home)
    if automations.find(automations.LOST_RUNS.format(project)) is None:
        print("a lost worker will not be noticed: `leash up --install` sets that up on this Prefect server", flush=True)
    made = trial.with_options(name=f"{project}-trial").to_deployment(
        name=name, work_pool_name=name, entrypoint_type=EntrypointType.MODULE_PATH, job_variables={"env": QUIET},
        tags=["leash", project], version=commit[:12],
    )  # fmt: skip
    try:
        cast("RunnerDeployment", made).apply()
    except (ObjectNotFound, ValueError) as error:
        how = f"`prefect worker start --pool {name} --type process` makes it (docs/how-to/remote.md)"
        raise UserError(f"work pool {name}: {' '.join(str(error).split())}; {how}") from None
    return Pool(home, name, f"{project}-trial/{name}")
