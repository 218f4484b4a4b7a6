"""The flow of a schedule: resolves the branch, and runs its commit in an isolated workspace."""

import hashlib
import os
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import task_run
from prefect.states import Cancelled

from flows import isolated, processes, workspace
from flows.guardian import Guardian
from flows.runner import PARENT_VARIABLE
from flows.workspace import Workspace
from rlhf_core.errors import UserError


class RunFailed(Exception):
    """`leash run` ended with an error in the workspace."""


@flow(name="nightly", persist_result=False)
def nightly(
    root: str, branch: str, overrides: list[str] | None = None, pull: bool = False, push: bool = False
) -> str | State[Any]:
    """Run the pipeline at the commit that `branch` names now, with `overrides` of parameters (`ppo.kl.coef=0.2`), and
    return the name of its DVC experiment. `pull` and `push` are those of `leash run`. Uncommitted changes in the
    checkout at `root` are neither used nor changed.

    A branch of a remote (`origin/main`) is fetched first. The same commit with the same overrides continues where an
    earlier run stopped. Raises UserError and RunFailed; a flow that is stopped is Cancelled.
    """
    home = Path(root)
    options = [word for word, chosen in (("--pull", pull), ("--push", push)) if chosen]
    fetch(home, branch)
    space = workspace_of(home, branch, overrides or [])
    get_run_logger().info(f"{branch} is at {space.commit[:12]}; workspace {space.root}")
    try:
        with processes.session(), processes.watched(Guardian(None)), workspace.opened(space, pull=pull):
            run_isolated(space, options)
    except (KeyboardInterrupt, SystemExit, processes.Stopped):
        return Cancelled(message=f"stopped; the next run of {space.commit[:8]} continues")
    return space.name


@task(name="leash run", cache_policy=NO_CACHE, persist_result=False)
def run_isolated(space: Workspace, options: list[str]) -> None:
    """`leash run` in the workspace; its own flow run is a child of this task. Raises UserError and RunFailed."""
    logger = get_run_logger()
    result = isolated.run(space, logger.info, options, variables={PARENT_VARIABLE: str(task_run.id)})
    if result.code:
        message = f"{result.error} (kept in {space.root})"
        raise UserError(message) if result.code == 2 else RunFailed(message)


def fetch(home: Path, branch: str) -> None:
    """Bring a remote's branch up to date; does nothing for a local one. Raises UserError when the remote fails."""
    remote, _, name = branch.partition("/")
    if name and remote in workspace.git(home, "remote").split():
        workspace.git(home, "fetch", "--quiet", remote, name)


def workspace_of(home: Path, branch: str, overrides: list[str]) -> Workspace:
    """The workspace of the branch's commit with these overrides. Raises UserError for an unknown branch."""
    commit = workspace.resolve(home, branch)
    marked = hashlib.sha256(os.fsencode("\n".join(overrides))).hexdigest()[:6] if overrides else ""
    return Workspace(home, "-".join(filter(None, ("nightly", commit[:8], marked))), commit, tuple(overrides))
