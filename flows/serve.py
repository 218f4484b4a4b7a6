"""`leash serve`: the nightly flow on a schedule, until stopped. It needs a running Prefect server: the temporary one of
a run has no scheduler, so a schedule would never fire.

Prefect's runner is a process of its own (`python -m flows.serve`) in its own group: SIGTERM made it hang and left the
flow running, SIGINT to the group ends both. The process in front turns every signal into that one.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from flows import processes, server, workspace
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from tasks.naming import project_name
from tasks.tracking.settings import without_credentials


def serve(
    root: Path, cron: str, timezone: str, branch: str | None = None, limit: int = 1, watch: float | None = None
) -> int:
    """Serve deployment `PROJECT-nightly/leash` at `cron` (five fields, in `timezone`): the commit that `branch` (None:
    the one checked out now) names at each start, in an isolated workspace, at most `limit` runs at the same time. Every
    `watch` seconds (None: never) it looks whether the data of the branch have changed, and starts a run where they
    have.

    The code that schedules is that of the branch's present commit: edits in the checkout do not reach it. Blocks;
    returns the runner's exit status. Raises UserError when no server answers, or `cron` or `branch` is not valid.
    """
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    url = server.require(root)
    try:
        CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"--cron {cron!r} --timezone {timezone!r}: {reason}") from None
    if branch is None:
        try:
            branch = workspace.git(root, "symbolic-ref", "--short", "--quiet", "HEAD").strip()
        except UserError:  # no branch is checked out
            branch = workspace.resolve(root, "HEAD")
    space = Workspace(root, workspace.SERVE, workspace.resolve(root, branch))
    with workspace.opened(space):
        try:
            shown = f"{project_name(root)}-nightly/leash at {cron!r} ({timezone})"
            print(f"{shown}, scheduled by {without_credentials(url)}; stop with Ctrl-C", flush=True)
            print(
                f"each run takes the commit of {branch} at its start (now {space.commit[:12]}), in work/runs/",
                flush=True,
            )
            command = [sys.executable, "-m", "flows.serve", cron, timezone, branch, str(limit), space.commit[:12]]
            env = workspace.process_environment(space.root, LEASH_HOME=str(root), PYTHONUNBUFFERED="1")
            with ThreadPoolExecutor(1) as listener, processes.session():
                runner = listener.submit(
                    processes.run, command, cwd=space.root, env=env, on_line=partial(print, flush=True),
                    signals=processes.RUNNER_SIGNALS,
                )  # fmt: skip
                seen = data_of(root, branch) if watch else ""
                while True:
                    with suppress(TimeoutError):
                        return runner.result(timeout=watch)
                    seen = _run_with_new_data(root, branch, seen)
        finally:
            workspace.remove(space)


def data_of(home: Path, branch: str) -> str:
    """The .dvc files of the branch's commit now, with their git hashes. Raises UserError."""
    workspace.fetch(home, branch)
    listed = workspace.git(home, "ls-tree", "-r", workspace.resolve(home, branch)).splitlines()
    return "\n".join(line for line in listed if line.endswith(".dvc"))


def _run_with_new_data(home: Path, branch: str, seen: str) -> str:
    """Start a run where the data are not those `seen`; the present ones. What fails is printed, and tried again."""
    from prefect.deployments import run_deployment
    from prefect.events import emit_event

    try:
        now = data_of(home, branch)
        if now != seen:
            commit, project = workspace.resolve(home, branch), project_name(home)
            print(f"the data of {branch} have changed; starting a run of {commit[:12]}", flush=True)
            run_deployment(f"{project}-nightly/leash", parameters={"branch": branch}, timeout=0,
                           flow_run_name=f"new data {commit[:8]}", idempotency_key=f"{home} {commit}")  # fmt: skip
            resource = {"prefect.resource.id": f"leash.{project}.data.{branch}", "leash.commit": commit}
            emit_event("leash.new-data", resource=resource)
    except Exception as error:  # a lost server, a remote that fails: the schedule goes on
        print(f"looking for new data failed: {' '.join(str(error).split())}", flush=True)
        return seen
    return now


def _serve_flow(cron: str, timezone: str, branch: str, limit: str, version: str) -> None:
    from prefect.schedules import Cron

    from flows.deployments import PROJECT, nightly

    nightly.serve(
        name="leash", schedule=Cron(cron, timezone=timezone), parameters={"branch": branch}, limit=int(limit),
        global_limit=int(limit), tags=["leash", PROJECT], version=version, print_starting_message=False,
    )  # fmt: skip


if __name__ == "__main__":
    _serve_flow(*sys.argv[1:])
