"""`leash serve`: the flow on a schedule, until stopped. It needs a running Prefect server: the temporary one of a run
has no scheduler, so a schedule would never fire.

Prefect's runner is a process of its own (`python -m flows.serve`) in its own group: SIGTERM made it hang and left the
flow running, SIGINT to the group ends both. The process in front turns every signal into that one.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from flows import processes, server
from rlhf_core.errors import UserError
from tasks.tracking.settings import without_credentials


def serve(root: Path, cron: str, timezone: str) -> int:
    """Serve deployment `leash/nightly` at `cron` (five fields, in `timezone`), one run at a time.

    Blocks; returns the runner's exit status. Raises UserError when no server answers or `cron` is not valid.
    """
    url = server.configured_url(root)
    if url is None:
        raise UserError("a schedule needs a running Prefect server, and none is configured; start one with `leash up`")
    shown = without_credentials(url)
    if not server.answers(url):
        raise UserError(f"no Prefect server answers at {shown}; start one with `leash up`, or correct PREFECT_API_URL")
    _check(cron, timezone)
    print(f"leash/nightly at {cron!r} ({timezone}), scheduled by {shown}; stop with Ctrl-C", flush=True)
    command = [sys.executable, "-m", "flows.serve", str(root), cron, timezone]
    env = {**os.environ, "PREFECT_API_URL": url, "PYTHONUNBUFFERED": "1"}
    with ThreadPoolExecutor(1) as listener, processes.session():
        runner = listener.submit(
            processes.run,
            command,
            cwd=root,
            env=env,
            on_line=partial(print, flush=True),
            signals=processes.RUNNER_SIGNALS,
        )
        return runner.result()


def _check(cron: str, timezone: str) -> None:
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    try:
        CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"--cron {cron!r} --timezone {timezone!r}: {reason}") from None


def _serve_flow(root: str, cron: str, timezone: str) -> None:
    from prefect.schedules import Cron

    from flows.pipeline import pipeline

    pipeline.serve(
        name="nightly", schedule=Cron(cron, timezone=timezone), parameters={"root": root},
        limit=1, global_limit=1, print_starting_message=False,
    )  # fmt: skip


if __name__ == "__main__":
    _serve_flow(*sys.argv[1:])
