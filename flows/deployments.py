"""The flows that a schedule or a worker starts: each runs one commit in an isolated workspace."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.runtime import flow_run, task_run
from prefect.states import Cancelled, Completed

from flows import isolated, processes, promotion, workspace
from flows.environment import PARENT_VARIABLE, find_root
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from tasks.naming import project_name
from tasks.stage.dvc_adapter import stored_files
from tasks.tracking.registry import CHAMPION, Registry
from tasks.tracking.settings import STUDY_VARIABLE, name_of_study

HOME_VARIABLE = "LEASH_HOME"
"""Environment variable of a worker or a schedule: its clone of the repository."""
ORIGIN = "origin"
"""The git remote through which workers get commits and give experiments."""
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class RunFailed(Exception):
    """`leash run` ended with an error in the workspace."""


def project_home() -> Path:
    """The clone whose commits are run: LEASH_HOME, else that of the current folder, else that of this code (a worker's
    runs begin in an empty folder). Raises UserError."""
    if named := os.environ.get(HOME_VARIABLE):
        return find_root(Path(named))
    with suppress(UserError):
        return find_root()
    return find_root(Path(__file__).parent)


PROJECT = project_name(project_home())


@flow(name=f"{PROJECT}-nightly", persist_result=False)
def nightly(
    branch: str = f"{ORIGIN}/main",
    overrides: list[str] | None = None,
    pull: bool = False,
    push: bool = False,
    share: bool = False,
) -> str | State[Any]:
    """Run the pipeline at the commit that `branch` names now, with `overrides` of parameters (`ppo.kl.coef=0.2`), and
    return the name of its DVC experiment. Its policy takes the champion's place where the rules of `promote:` hold. The
    state of the flow is named Promoted; else Restored where no stage had to run, else Kept or Undecided.

    `pull` and `push` are those of `leash run`; with `share`, on a worker, both hold and the experiment goes to origin.
    The project is `project_home`; uncommitted changes there are neither used nor changed. A branch of a remote
    (`origin/main`) is fetched first. The same commit with the same overrides continues where an earlier run stopped.
    Raises UserError and RunFailed; a flow that is stopped is Cancelled.
    """
    home, log, overrides = _home_of_run(), get_run_logger(), overrides or []
    _refuse_code(overrides)
    workspace.fetch(home, branch)
    space = workspace_of(home, branch, overrides)
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, name=space.name)
    log.info(f"{branch} is at {space.commit[:12]}; workspace {space.root}")

    registry, champion = Registry(home), None
    trailers = {isolated.NIGHTLY: branch}
    try:
        if (found := registry.by_alias(CHAMPION)) is not None:
            stored_files(home, found.digest)
            champion, trailers[promotion.COMPARED] = found, found.digest
    except UserError as error:
        log.warning(f"the champion is not compared: {error}")
    options = [word for word, chosen in (("--pull", pull or share), ("--push", push or share)) if chosen]
    try:
        with _opened(promotion.with_champion(space, champion), "--pull" in options) as space:
            if champion is not None:
                promotion.place(space, champion)
            ran = run_isolated(space, options, {}, trailers)
            if share:
                isolated.send(home, ORIGIN, space.commit, space.name)
    except (KeyboardInterrupt, SystemExit, processes.Stopped):
        return Cancelled(message=f"stopped; the next run of {space.name} continues")

    what = f"ran {', '.join(ran)}" if ran else "no stage ran: every result was there already"
    try:
        decision = promotion.judge(home, space.name, space.commit, registry)
    except UserError as error:
        log.warning(f"no decision about the champion: {error}")
        return Completed(name="Undecided" if ran else "Restored", message=f"{error} ({what})", data=space.name)
    log.info(f"{decision.text}\n{what}")
    create_markdown_artifact(key="leash-promotion", markdown=decision.markdown, description="Who is the champion")
    try:
        if (version := registry.by_number(decision.challenger)) is not None:
            registry.tag(version, {"leash.prefect": str(flow_run.ui_url)})
            if page := registry.page(version):
                create_link_artifact(page, link_text="the run in MLflow", key="leash-mlflow")
    except UserError as error:
        log.warning(f"no link to MLflow: {error}")
    word = "promoted" if decision.promoted else "kept"
    if not decision.unchanged:
        policy = f"leash.{project_name(home)}.policy.{decision.challenger}"
        resource = {"prefect.resource.id": policy, "leash.experiment": space.name}
        emit_event(f"leash.{word}", resource=resource, payload={"decision": decision.title})
    name = word.title() if ran or decision.promoted else "Restored"
    return Completed(name=name, message=f"{decision.title} ({what})", data=space.name)


@flow(name=f"{PROJECT}-trial", persist_result=False)
def trial(
    name: str, commit: str, overrides: list[str], study: str | None = None, options: list[str] | None = None
) -> str | State[Any]:
    """Run one trial of a study on a worker, send it to the git remote as a DVC experiment, and return its `name`.

    `options` are those of `leash run`. Inputs come from the DVC remote and outputs go there. A trial that the git
    remote has is not run again. Raises and ends as `nightly`.
    """
    home = _home_of_run()
    _refuse_code(overrides)
    if not HASH.fullmatch(commit) or name != isolated.as_name(name):
        raise UserError(f"trial {name!r} of {commit!r}: not a name and the hash of a commit")
    try:
        if isolated.fetch(home, ORIGIN, commit, name):
            get_run_logger().info(f"experiment {name} is there; nothing to run")
        else:
            try:
                workspace.resolve(home, commit)
            except UserError:
                workspace.git(home, "fetch", "--quiet", ORIGIN)
                workspace.resolve(home, commit)
            variables, trailers = (
                ({STUDY_VARIABLE: study}, {isolated.STUDY: name_of_study(study)}) if study else ({}, {})
            )
            with _opened(Workspace(home, name, commit, tuple(overrides)), pull=True) as space:
                run_isolated(space, [*(options or []), "--pull", "--push"], variables, trailers)
        isolated.send(home, ORIGIN, commit, name)  # an earlier run of it may have ended before it could
    except (KeyboardInterrupt, SystemExit, processes.Stopped):
        return Cancelled(message=f"stopped; the next run of {name} continues")
    return name


@task(name="leash run", cache_policy=NO_CACHE, persist_result=False)
def run_isolated(
    space: Workspace, options: list[str], variables: dict[str, str], trailers: dict[str, str]
) -> list[str]:
    """`leash run` in the workspace; its own flow run is a child of this task. Returns the stages that ran. Raises
    UserError and RunFailed."""
    variables = {**variables, PARENT_VARIABLE: str(task_run.id)}
    result = isolated.run(space, get_run_logger().info, options, variables, trailers)
    if result.code:
        message = f"{result.error} (kept in {space.root})"
        raise UserError(message) if result.code == 2 else RunFailed(message)
    return result.ran


@contextmanager
def _opened(space: Workspace, pull: bool) -> Iterator[Workspace]:
    """The open workspace; what runs in it stops with the block, and when this process is killed."""
    with processes.session(), workspace.opened(space, pull=pull):
        yield space


def _home_of_run() -> Path:
    """`project_home`. Raises UserError where the flow run is one of another project: its worker has the wrong clone."""
    home = project_home()
    with get_client(sync_client=True) as client:  # Prefect's `flow_run.flow_name` is the name of the flow in this clone
        name = client.read_flow(client.read_flow_run(flow_run.id).flow_id).name
    wanted, own = name.rpartition("-")[0], project_name(home)
    if wanted != own:
        raise UserError(f"a run of project {wanted} on a worker of {own} ({home}); give each project its own work pool")
    return home


def _refuse_code(overrides: list[str]) -> None:
    """Whoever reaches the Prefect server chooses the overrides; which code of others runs is chosen in the commit."""
    if refused := next((one for one in overrides if "trust_remote_code" in one), None):
        raise UserError(f"overrides: {refused!r}: set trust_remote_code in params.yaml and commit it")


def workspace_of(home: Path, branch: str, overrides: list[str]) -> Workspace:
    """The workspace of the branch's commit with these overrides. Raises UserError for an unknown branch."""
    commit = workspace.resolve(home, branch)
    marked = hashlib.sha256(os.fsencode("\n".join(overrides))).hexdigest()[:6] if overrides else ""
    return Workspace(home, "-".join(filter(None, ("nightly", commit[:8], marked))), commit, tuple(overrides))
