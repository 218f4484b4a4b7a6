"""`leash serve`: the nightly flow on a schedule, until stopped. It needs a running Prefect server: the temporary one of
a run has no scheduler, so a schedule would never fire.

Prefect's runner is a process of its own (`python -m flows.serve`) in its own group: SIGTERM made it hang and left the
flow running, SIGINT to the group ends both. The process in front turns every signal into that one.
"""

import sys
import threading
import time
from functools import partial
from pathlib import Path

from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments import run_deployment
from prefect.schedules import Cron
from pydantic import ValidationError

from flows import processes, server, workspace
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from tasks.naming import project_name
from tasks.tracking.settings import without_credentials


def serve(root: Path, cron: str, timezone: str, branch: str | None, limit: int, watch: float | None) -> int:
    """Serve deployment `PROJECT-nightly/leash` at `cron` (five fields, in `timezone`): the commit that `branch` (None:
    the one checked out now) names at each start, in an isolated workspace, at most `limit` runs at the same time. Every
    `watch` seconds (None: never) it looks whether the data of the branch have changed, and starts a run where they
    have.

    The code that schedules is that of the branch's present commit: edits in the checkout do not reach it. Blocks;
    returns the runner's exit status. Raises UserError when no server answers, or `cron` or `branch` is not valid.
    """
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
    log = partial(print, flush=True)
    with workspace.opened(space):
        try:
            shown = f"{project_name(root)}-nightly/leash at {cron!r} ({timezone})"
            log(f"{shown}, scheduled by {without_credentials(url)}; stop with Ctrl-C")
            log(f"each run takes the commit of {branch} at its start (now {space.commit[:12]}), in work/runs/")
            if watch is not None:
                threading.Thread(target=run_at_new_data, args=(root, branch, watch), daemon=True).start()
            command = [sys.executable, "-m", "flows.serve", cron, timezone, branch, str(limit), space.commit[:12]]
            env = workspace.process_environment(space.root, LEASH_HOME=str(root), PYTHONUNBUFFERED="1")
            with processes.session():
                return processes.run(command, cwd=space.root, env=env, on_line=log, signals=processes.RUNNER_SIGNALS)
        finally:
            workspace.remove(space)


def run_at_new_data(home: Path, branch: str, seconds: float) -> None:
    """Look every so many seconds at the .dvc files of the branch, and start a run where they have changed."""
    deployment, seen = f"{project_name(home)}-nightly/leash", ""
    while True:
        try:
            workspace.fetch(home, branch)
            commit = workspace.resolve(home, branch)
            listed = workspace.git(home, "ls-tree", "-r", commit).splitlines()
            data = "\n".join(line for line in listed if line.endswith(".dvc")) or "none"
            if seen and data != seen:
                print(f"the data of {branch} have changed; starting a run of {commit[:12]}", flush=True)
                run_deployment(deployment, parameters={"branch": branch}, timeout=0, as_subflow=False,
                               flow_run_name=f"new data {commit[:8]}", idempotency_key=f"{home} {commit}")  # fmt: skip
            seen = data
        except Exception as error:  # a lost server, a remote that fails: the schedule goes on
            print(f"looking for new data failed: {' '.join(str(error).split())}", flush=True)
        time.sleep(seconds)


def main(cron: str, timezone: str, branch: str, limit: str, version: str) -> None:
    """`python -m flows.serve`: Prefect's runner."""
    from flows.deployments import PROJECT, nightly

    nightly.serve(
        name="leash", schedule=Cron(cron, timezone=timezone), parameters={"branch": branch}, limit=int(limit),
        global_limit=int(limit), tags=["leash", PROJECT], version=version, print_starting_message=False,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
