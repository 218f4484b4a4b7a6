"""`leash run`: one run of the flow with a Prefect server that answers, and how its stages ended."""

import logging
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from flows import driver, processes, remote, server, terminal
from flows.environment import PARENT_VARIABLE
from flows.graph import MAY_RUN, RESTORES, RUNS, UNCHANGED, brief
from flows.stages import FAILED, UP_TO_DATE, Outcome, PipelineFailed
from flows.text import table
from rlhf_core.errors import UserError
from tasks.naming import project_name
from tasks.params.loader import PARAMS_FILE, parse, read_yaml, why_switched_off
from tasks.tracking.settings import without_credentials

Forecast = Mapping[str, tuple[str, list[str]]]
"""`Project.forecast`: stage -> what a run will do with it, and why."""


def run(
    root: Path,
    stages: list[str] | None,
    force: bool,
    jobs: int = 1,
    pull: bool = False,
    push: bool = False,
    dry_run: bool = False,
    **options: Any,
) -> int:
    """Run the flow (`options` as its parameters) and print how its stages ended; returns the exit code. Where all is up
    to date there is no flow. With `dry_run` only print what would run, and why.

    Raises UserError for an unknown stage, a refused params.yaml, no remote where `pull` or `push` need one, another
    run in this workspace, or a Prefect server that does not answer.
    Ends the process where the server is lost in between.
    """
    failure = None
    with driver.exclusive(root) as project:
        graph = project.graph.select(stages)
        checks = "check" in graph.stages
        content = read_yaml(root / PARAMS_FILE) if checks or (root / PARAMS_FILE).exists() else {}
        if checks:  # the stage refuses the same, after a server has started
            from tasks.params.all import Params

            parse(Params, content, file=PARAMS_FILE)
        address = remote.require(root, pull, push)
        off = {stage for stage in graph.stages if why_switched_off(content, stage)}
        expected = project.forecast(graph, force)
        plan = any(what != UNCHANGED for what, _ in expected.values())
        if dry_run:
            print(dry_run_table(expected, off), flush=True)
            return 0
        with terminal.screen(graph.stages, off):
            terminal.print_line("", first_line(expected, off))
            if plan and pull:
                terminal.print_line("", f"what the remote {address} has is fetched, not computed")
            if plan or project.changed_sources(graph) or push:
                if server.configured_url(root) is not None:
                    server.require(root)
                else:
                    terminal.print_line(
                        "", "starting a Prefect server for this run (`leash up` keeps one running and saves this time)"
                    )
                    url = server.start_temporary(root)
                    import flows.pipeline  # noqa: F401 - takes seconds, while the server starts

                    server.wait_for_temporary(url)
                failure = _run_flow(
                    root, stages=stages, force=force, root=str(root), jobs=jobs, pull=pull, push=push, **options
                )
            else:
                for stage in graph.stages:
                    terminal.end(Outcome(stage, UP_TO_DATE, 0.0))
    print("\n" + terminal.closing_table(), flush=True)
    return _print_failure(failure) if failure else 0


def first_line(expected: Forecast, off: Collection[str]) -> str:
    """How many stages are up to date, and which others there are, without those that are switched off."""
    stages: dict[str, list[str]] = {UNCHANGED: [], RESTORES: [], RUNS: [], MAY_RUN: []}
    for stage, (what, _) in expected.items():
        if stage not in off:
            stages[what].append(stage)
    unchanged, count = stages.pop(UNCHANGED), sum(map(len, stages.values()))
    if count == 0:
        return f"{len(unchanged)} stages, all up to date"
    parts = [f"{what.replace('its', 'their')}: {', '.join(names)}" for what, names in stages.items() if names]
    return f"{count + len(unchanged)} stages, {len(unchanged)} up to date; {'; '.join(parts)}"


def dry_run_table(expected: Forecast, off: Collection[str]) -> str:
    """Each stage, what a run will do with it, and why; those that are switched off in the last line."""
    rows = [(stage, what, brief(why)) for stage, (what, why) in expected.items() if stage not in off]
    lines = [table([("stage", "what", "why"), *rows])]
    if any(what == RUNS for what, _ in expected.values()):
        lines.append("What DVC's run cache has for the new inputs is restored, not run.")
    return "\n".join([*lines, *terminal.switched_off_line([stage for stage in expected if stage in off])])


def _print_failure(failure: PipelineFailed) -> int:
    """Print why stages failed, and how to go on; returns the exit code."""
    for error in failure.errors:
        terminal.print_error(str(error))
    failed = ", ".join(one.stage for one in failure.outcomes if one.state == FAILED)
    when = "after the correction the" if failure.is_user_error else "the"
    print(f"{when} same command continues with {failed}", flush=True)
    return 2 if failure.is_user_error else 1


def _run_flow(project: Path, **parameters: Any) -> PipelineFailed | None:
    """Run the flow; where another process gives a task run as its parent, as a child of that, as
    `prefect.deployments.run_deployment` does. Returns why stages failed."""
    from prefect import tags
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    from flows.pipeline import pipeline

    name = project_name(project)
    named = pipeline.with_options(name=f"{name}-run")
    try:
        if parent := os.environ.get(PARENT_VARIABLE):
            with get_client(sync_client=True) as client:
                child = client.create_flow_run(
                    named, parameters=parameters, parent_task_run_id=UUID(parent), tags=["leash", name]
                )
            run_flow(named, flow_run=child, parameters=parameters)
        else:
            with tags("leash", name):
                named(**parameters)
    except PipelineFailed as failure:
        return failure
    except BaseException as error:
        if not isinstance(error, UserError) and not server.answers(os.environ["PREFECT_API_URL"]):
            _exit_without_server(error)
        if interrupt := processes.interrupt():  # the flow has ended as Cancelled
            raise interrupt from None
        raise
    return None


def _exit_without_server(error: BaseException) -> None:
    """End at once a run whose Prefect server is lost: Prefect's own threads would try to reach it for minutes."""
    causes: list[BaseException | None] = [processes.interrupt()]
    link: BaseException | None = error
    while link is not None:
        causes.append(link)
        link = link.__cause__ or link.__context__
    failure = next((one for one in causes if isinstance(one, PipelineFailed)), None)
    interrupt = next((one for one in causes if isinstance(one, KeyboardInterrupt | SystemExit)), None)
    code = 1
    print("\n" + terminal.closing_table(), flush=True)
    if interrupt is not None:
        code = 130 if isinstance(interrupt, KeyboardInterrupt) else int(str(interrupt.code))
        terminal.print_error(terminal.stopped())
    elif failure is not None:
        code = _print_failure(failure)
    else:
        shown = without_credentials(os.environ["PREFECT_API_URL"])
        terminal.print_error(
            f"the Prefect server ({shown}) died or hangs, so it has no record of how this run ended; the results of "
            "the stages are kept, and the same command continues"
        )
    server.stop_temporary(processes.KILL_SIGNALS)
    sys.stdout.flush()
    os._exit(code)


def quiet_prefect() -> None:
    """Switch Prefect's console log off in favour of our live lines (its log of the run keeps everything), and limit
    how long it tries to reach a lost server. While its database is locked, by runs side by side or by a slow disk, the
    server answers 503; three more tries take 14 seconds."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "3")
    os.environ.setdefault("PREFECT_API_REQUEST_TIMEOUT", "10")
    logging.raiseExceptions = False  # else Prefect's sender of logs prints each of its failures
