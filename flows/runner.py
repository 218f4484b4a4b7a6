"""`leash run`: one run of the flow with a Prefect server that answers, and how its stages ended."""

import logging
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from flows import driver, processes, remote, server, terminal
from flows.environment import PARENT_VARIABLE
from flows.stages import FAILED, UP_TO_DATE, Outcome, PipelineFailed
from rlhf_core.errors import UserError
from tasks.naming import project_name
from tasks.params.loader import PARAMS_FILE, is_switched_off, parse, read_yaml
from tasks.params.methods import BY_NAME
from tasks.params.scorer import MADE_FOR_IT
from tasks.tracking.settings import without_credentials

if TYPE_CHECKING:
    from prefect import Flow

    from flows.graph import Graph


def run(
    root: Path,
    stages: list[str] | None,
    force: bool,
    jobs: int = 1,
    pull: bool = False,
    push: bool = False,
    **options: Any,
) -> int:
    """Run the flow (`options` as its parameters) and print how its stages ended; returns the exit code. Where all is up
    to date there is no flow.

    Raises UserError for an unknown stage, a refused params.yaml, no remote where `pull` or `push` need one, another
    run in this workspace, or a Prefect server that does not answer.
    Ends the process where the server is lost in between.
    """
    failure = None
    with driver.exclusive(root) as project:
        graph = project.graph.select(stages)
        if "check" in graph.stages:  # the stage refuses the same, after a server has started
            from tasks.params.all import Params

            parse(Params, read_yaml(root / PARAMS_FILE), file=PARAMS_FILE)
        address = remote.require(root, pull, push)
        off = switched_off(root / PARAMS_FILE)
        with terminal.screen(graph.stages, off):
            plan = {stage: ["--force"] for stage in graph.stages} if force else project.plan(graph)
            fetches = f"{len(graph.stages)} stages; what the remote {address} has is fetched, not computed"
            terminal.print_line("", fetches if pull and plan else first_line(graph, plan, off))
            if plan or project.changed_sources(graph) or push:
                _connect(root)
                failure = _run_flow(
                    stages=stages, force=force, root=str(root), jobs=jobs, pull=pull, push=push, **options
                )
            else:
                for stage in graph.stages:
                    terminal.end(Outcome(stage, UP_TO_DATE, 0.0))
    print("\n" + terminal.closing_table(), flush=True)
    if failure:
        _print_failure(failure)
    return 0 if failure is None else 2 if failure.is_user_error else 1


def switched_off(params: Path) -> set[str]:
    """The stages that only write empty outputs; none where the file cannot be read."""
    with suppress(UserError, AttributeError):
        content = read_yaml(params)
        return {name for name in (*MADE_FOR_IT, *BY_NAME) if is_switched_off(content, name)}
    return set()


def first_line(graph: "Graph", plan: dict[str, list[str]], off: Collection[str] = ()) -> str:
    """How many stages will run, and which: those that are not up to date, and perhaps those below them. Those that are
    switched off write empty outputs, and are not counted."""
    total = sum(stage not in off for stage in graph.stages)
    unused = [stage for stage in graph.stages if stage in off]
    end = f" (switched off: {', '.join(unused)})" if unused else ""
    counted = {stage: why for stage, why in plan.items() if stage not in off}
    if not plan:
        return f"{total} stages, all up to date{end}"
    stale = [stage for stage, why in counted.items() if why]
    below = len(counted) - len(stale)
    named, above = (f": {', '.join(stale)}", "them") if stale else ("", "a changed one")
    more = f"; and up to {below} below {above}, where their inputs change" if below else ""
    return f"{len(stale)} of {total} stages to run{named}{more}{end}"


def _print_failure(failure: PipelineFailed) -> None:
    for error in failure.errors:
        terminal.print_error(str(error))
    failed = ", ".join(one.stage for one in failure.outcomes if one.state == FAILED)
    when = "after the correction the" if failure.is_user_error else "the"
    print(f"{when} same command continues with {failed}", flush=True)


def _run_flow(**parameters: Any) -> PipelineFailed | None:
    from flows.pipeline import pipeline

    named = pipeline.with_options(name=project_name(Path(parameters["root"])))
    try:
        if parent := os.environ.get(PARENT_VARIABLE):
            _run_below(parent, named, parameters)
        else:
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


def _run_below(parent: str, pipeline: "Flow[..., Any]", parameters: dict[str, Any]) -> None:
    """Run the flow as a child of the task run `parent` of another process, as `prefect.deployments.run_deployment`
    does."""
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    with get_client(sync_client=True) as client:
        child = client.create_flow_run(pipeline, parameters=parameters, parent_task_run_id=UUID(parent))
    run_flow(pipeline, flow_run=child, parameters=parameters)


def _connect(root: Path) -> None:
    """Use the configured server, or start one for this run. Raises UserError when it does not answer."""
    if server.configured_url(root) is not None:
        server.require(root)
        return
    terminal.print_line("", "starting a Prefect server for this run (`leash up` keeps one running and saves this time)")
    url = server.start_temporary(root)
    import flows.pipeline  # noqa: F401 - takes seconds, while the server starts

    server.wait_for_temporary(url)


def _exit_without_server(error: BaseException) -> None:
    """End at once a run whose Prefect server is lost: Prefect's own threads would try to reach it for minutes."""
    causes = [*_chain(error), processes.interrupt()]
    failure = next((one for one in causes if isinstance(one, PipelineFailed)), None)
    interrupt = next((one for one in causes if isinstance(one, KeyboardInterrupt | SystemExit)), None)
    code = 1
    print("\n" + terminal.closing_table(), flush=True)
    if interrupt is not None:
        code = 130 if isinstance(interrupt, KeyboardInterrupt) else int(str(interrupt.code))
        terminal.print_error(terminal.stopped())
    elif failure is not None:
        code = 2 if failure.is_user_error else 1
        _print_failure(failure)
    else:
        shown = without_credentials(os.environ["PREFECT_API_URL"])
        terminal.print_error(
            f"the Prefect server ({shown}) died or hangs, so it has no record of how this run ended; the results of "
            "the stages are kept, and the same command continues"
        )
    server.stop_temporary(processes.KILL_SIGNALS)
    sys.stdout.flush()
    os._exit(code)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it followed."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def quiet_prefect() -> None:
    """Switch Prefect's console log off in favour of our live lines (its log of the run keeps everything), and limit
    how long it tries to reach a lost server."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "1")
    os.environ.setdefault("PREFECT_API_REQUEST_TIMEOUT", "10")
    logging.raiseExceptions = False  # else Prefect's sender of logs prints each of its failures
