"""One run of the flow, as `leash run` makes it: a Prefect server that answers, the stages, and how they ended."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from flows import lifeline, processes, server
from flows.stages import Outcome, PipelineFailed
from flows.terminal import complain, outcome_table
from rlhf_core.errors import UserError
from tasks.tracking.settings import without_credentials


def run(root: Path, stages: list[str] | None, force: bool, retries: int, delay: float, timeout: float | None) -> int:
    """Run the flow and print how its stages ended; the exit code. Raises UserError where no Prefect server answers.
    The loss of the server in between ends the process."""
    _connect(root)
    from flows.pipeline import pipeline  # takes seconds; a server that is not there is said before

    try:
        outcomes = pipeline(stages, force, str(root), retries, delay, timeout)
    except PipelineFailed as failure:
        return _report(failure)
    except Exception as error:
        if not isinstance(error, UserError) and lifeline.lost():
            _leave_without_server(error, [])
        raise
    print("\n" + outcome_table(outcomes.values()))
    return 0


def _connect(root: Path) -> None:
    """Point Prefect at a server that answers; lend it one for this run where none is named. Raises UserError."""
    url = server.configured_url(root)
    if url is not None and not server.answers(url):
        shown = without_credentials(url)
        raise UserError(f"no Prefect server answers at {shown}; start one with `leash up`, or unset PREFECT_API_URL")
    if url is None:
        print("starting a Prefect server for this run (`leash up` keeps one, and saves these seconds)", flush=True)
        log = root / "work" / "prefect-server-run.log"
        log.parent.mkdir(exist_ok=True)
        url = server.start_temporary(log)
    server.use(url)
    lifeline.hold(url, _leave_without_server)


def _report(failure: PipelineFailed) -> int:
    """Print how the stages ended, and why those that failed did; the exit code."""
    print("\n" + outcome_table(failure.outcomes), flush=True)
    for error in failure.errors:
        complain(str(error))
    return 2 if failure.users_fault else 1


def _leave_without_server(error: BaseException | None, outcomes: list[Outcome]) -> NoReturn:
    """The end of a run whose Prefect server is gone: at once, for Prefect would go on asking for it for minutes."""
    code = 1
    if isinstance(error, PipelineFailed):
        _report(error)
    elif outcomes:
        print("\n" + outcome_table(outcomes))
    if isinstance(error, KeyboardInterrupt | SystemExit):
        code = 130 if isinstance(error, KeyboardInterrupt) else int(str(error.code))
        complain("stopped; nothing is left running")
    else:
        shown = without_credentials(os.environ["PREFECT_API_URL"])
        complain(
            f"the Prefect server ({shown}) died or hangs, and cannot be told how this run "
            "ended; what the stages made is kept, the same command goes on from there"
        )
    server.stop_temporary(processes.AT_ONCE)
    sys.stdout.flush()
    os._exit(code)
