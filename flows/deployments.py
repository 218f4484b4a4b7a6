"""The flows that a schedule or a worker starts: each runs one commit in an isolated workspace."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.runtime import flow_run, task_run
from prefect.states import Cancelled, Completed

from flows import isolated, processes, promotion, workspace
from flows.environment import PARENT_VARIABLE, find_root
from flows.guardian import Guardian
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from tasks.tracking.registry import CHAMPION, Registry, Version
from tasks.tracking.settings import STUDY_VARIABLE

HOME_VARIABLE = "LEASH_HOME"
"""Environment variable of a worker: its clone of the repository."""
ORIGIN = "origin"
"""The git remote through which workers get commits and give experiments."""
REMOTE_OPTIONS = ("--pull", "--push")
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class RunFailed(Exception):
    """`leash run` ended with an error in the workspace."""


@flow(name="nightly", persist_result=False)
def nightly(
    root: str | None = None,
    branch: str = f"{ORIGIN}/main",
    overrides: list[str] | None = None,
    pull: bool = False,
    push: bool = False,
) -> str | State[Any]:
    """Run the pipeline at the commit that `branch` names now, with `overrides` of parameters (`ppo.kl.coef=0.2`), and
    return the name of its DVC experiment. Its policy takes the champion's place where the rules of `promote:` hold; the
    state of the flow is named Promoted or Kept. `pull` and `push` are those of `leash run`. Uncommitted changes in the
    checkout at `root` are neither used nor changed.

    Without `root` it runs on a worker, as `trial` does. A branch of a remote (`origin/main`) is fetched first. The same
    commit with the same overrides continues where an earlier run stopped. Raises UserError and RunFailed; a flow that
    is stopped is Cancelled.
    """
    home = Path(root) if root else _home()
    workspace.fetch(home, branch)
    space = workspace_of(home, branch, overrides or [])
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, name=space.name)
    get_run_logger().info(f"{branch} is at {space.commit[:12]}; workspace {space.root}")
    options = [word for word, chosen in (("--pull", pull), ("--push", push)) if chosen]
    registry = Registry(home)
    champion = _champion(space, registry)
    trailers = {isolated.NIGHTLY: branch, **({promotion.COMPARED: champion.digest} if champion else {})}
    ended = _run(promotion.with_champion(space, champion), options, root is None, {}, trailers, champion)
    return _promote(space, registry) if ended is None else ended


@flow(name="trial", persist_result=False)
def trial(
    name: str, commit: str, overrides: list[str], study: str | None = None, options: list[str] | None = None
) -> str | State[Any]:
    """Run one trial of a study on a worker, send it to the git remote as a DVC experiment, and return its `name`.

    `options` are those of `leash run`. Inputs come from the DVC remote and outputs go there. A trial that the git
    remote has is not run again. Raises and ends as `nightly`.
    """
    home = _home()
    if not HASH.fullmatch(commit) or name != isolated.as_name(name):
        raise UserError(f"trial {name!r} of {commit!r}: not a name and the hash of a commit")
    if isolated.fetch(home, ORIGIN, commit, name):
        get_run_logger().info(f"experiment {name} is there; nothing to run")
        isolated.send(home, ORIGIN, commit, name)  # an earlier run of it may have ended before it could
        return name
    workspace.fetch_commit(home, ORIGIN, commit)
    variables = {STUDY_VARIABLE: study} if study else {}
    space = Workspace(home, name, commit, tuple(overrides))
    return _run(space, options or [], True, variables, {isolated.STUDY: study} if study else {}) or name


def _run(
    space: Workspace,
    options: list[str],
    for_worker: bool,
    variables: dict[str, str],
    trailers: dict[str, str],
    champion: Version | None = None,
) -> State[Any] | None:
    """Run the commit in its workspace; on a worker through the DVC remote, and the experiment goes to git's. None at
    the good end; a run that was stopped is Cancelled."""
    given = [*options, *(REMOTE_OPTIONS if for_worker else ())]
    try:
        with (
            processes.session(),
            processes.watched(Guardian(None)),
            workspace.opened(space, pull="--pull" in given),
        ):
            if champion is not None:
                promotion.place(space, champion)
            run_isolated(space, given, variables, trailers)
            if for_worker:
                isolated.send(space.home, ORIGIN, space.commit, space.name)
    except (KeyboardInterrupt, SystemExit, processes.Stopped):
        return Cancelled(message=f"stopped; the next run of {space.name} continues")
    return None


def _champion(space: Workspace, registry: Registry) -> Version | None:
    """The champion, if its files are to be had; what is missing is a warning, and the run goes on without."""
    try:
        champion = registry.by_alias(CHAMPION)
        if champion is not None:
            promotion.files_of(space.home, champion)
    except UserError as error:
        get_run_logger().warning(f"the champion is not compared: {error}")
        return None
    return champion


def _promote(space: Workspace, registry: Registry) -> State[Any]:
    """Decide about the policy of a run that has ended well, and announce it: state, artifact, events."""
    try:
        decision = promotion.judge(space.home, space.name, space.commit, registry)
    except UserError as error:
        get_run_logger().warning(f"no decision about the champion: {error}")
        return Completed(name="Undecided", message=str(error), data=space.name)
    get_run_logger().info(decision.text)
    create_markdown_artifact(key="leash-promotion", markdown=decision.markdown, description="Who is the champion")
    word = promotion.PROMOTED if decision.promoted else promotion.KEPT
    if not decision.unchanged:
        resource = {"prefect.resource.id": f"leash.policy.{decision.challenger}", "leash.experiment": space.name}
        emit_event(f"leash.{word}", resource=resource, payload={"decision": decision.title})
    return Completed(name=word.title(), message=decision.title, data=space.name)


@task(name="leash run", cache_policy=NO_CACHE, persist_result=False)
def run_isolated(space: Workspace, options: list[str], variables: dict[str, str], trailers: dict[str, str]) -> None:
    """`leash run` in the workspace; its own flow run is a child of this task. Raises UserError and RunFailed."""
    logger = get_run_logger()
    result = isolated.run(space, logger.info, options, {**variables, PARENT_VARIABLE: str(task_run.id)}, trailers)
    if result.code:
        message = f"{result.error} (kept in {space.root})"
        raise UserError(message) if result.code == 2 else RunFailed(message)


def _home() -> Path:
    """The clone in which a worker works. Raises UserError."""
    home = os.environ.get(HOME_VARIABLE)
    if not home:
        raise UserError(f"{HOME_VARIABLE} is not set; start the worker with `leash worker` in a clone of the project")
    return find_root(Path(home))


def workspace_of(home: Path, branch: str, overrides: list[str]) -> Workspace:
    """The workspace of the branch's commit with these overrides. Raises UserError for an unknown branch."""
    commit = workspace.resolve(home, branch)
    marked = hashlib.sha256(os.fsencode("\n".join(overrides))).hexdigest()[:6] if overrides else ""
    return Workspace(home, "-".join(filter(None, ("nightly", commit[:8], marked))), commit, tuple(overrides))
