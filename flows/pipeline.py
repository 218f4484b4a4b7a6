"""The Prefect flow: the graph of `dvc.yaml`, a Prefect task for each stage. `serve` pickles this module, so locks,
events and registries are kept in other modules."""

import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, cast

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture, as_completed
from prefect.states import Cancelled, Completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.utilities.names import generate_slug

from flows import artifacts, driver, processes, remote, terminal
from flows.environment import find_root
from flows.execution import Execution, Print, places
from flows.graph import Graph
from flows.stages import FAILED, NOT_RUN, Outcome, PipelineFailed, StageCrash, StageUserError
from rlhf_core.errors import UserError
from tasks.stage.dvc_adapter import recorded_order, restore_order
from tasks.stage.pipeline_run import finish
from tasks.tracking.settings import RUN_VARIABLE


def is_retriable(task: Any, run: Any, state: State[Any]) -> bool:
    """Whether a failed stage is tried again: not after a user's error."""
    return not isinstance(state.result(raise_on_failure=False), UserError)


@task(cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=is_retriable)
def stage_task(execution: Execution, stage: str) -> State[Outcome]:
    """One stage, in a Prefect state named after what DVC did: Completed, UpToDate or Restored; or Cancelled."""
    try:
        outcome = execution.run(stage)
    except processes.Stopped:
        return Cancelled(message="stopped with the run")
    message = outcome.message or (f"its reason: {outcome.why}" if outcome.why else None)
    return Completed(name=outcome.state, message=message, data=outcome)


def _threads() -> TaskRunner[PrefectFuture[Any]]:
    """A thread for each running stage reads the output of its process."""
    runner: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner()
    return cast(TaskRunner[PrefectFuture[Any]], runner)


def _name() -> str:
    """The name of an isolated run, else two words."""
    return os.environ.get(RUN_VARIABLE) or generate_slug(2)


@flow(name="leash", flow_run_name=_name, task_runner=_threads(), persist_result=False)
def pipeline(
    stages: list[str] | None = None,
    force: bool = False,
    root: str | None = None,
    retries: int = 2,
    retry_delay_seconds: float = 10.0,
    timeout_seconds: float | None = None,
    jobs: int = 1,
    pull: bool = False,
    push: bool = False,
) -> dict[str, Outcome] | State[Any]:
    """Run `stages` and what they need (None: all) and return how each ended, in the order of the graph.

    `root` is the project (default: found from the current folder upwards); `timeout_seconds` limits each stage; `jobs`
    is how many independent stages run side by side, on a GPU each where there are GPUs.
    `pull` fetches from DVC's default remote what the remote has and the run needs; `push` sends the results of the
    stages that ended well.
    Raises UserError before anything starts (an unknown stage, another run in this workspace, no remote) or when the
    remote fails, PipelineFailed when a stage failed; then no stage that needs it has run. A flow whose stages were
    interrupted is Cancelled.
    """
    home = find_root(Path(root) if root else None)
    options = {"retries": retries, "retry_delay_seconds": retry_delay_seconds}
    with driver.exclusive(home) as project:
        graph = project.graph.select(stages)
        remote.require(home, pull, push)
        execution = Execution(project, force, timeout_seconds, retries + 1, _printer(), pull=pull)
        try:
            outcomes, errors = _run(execution, graph, jobs, options, stages or graph.stages)
            unsent = _push(execution, graph, outcomes) if push else None
        except (KeyboardInterrupt, SystemExit):
            return Cancelled(message="stopped")
        ended = list(outcomes.values())
        if missing := finish(home):
            get_run_logger().warning(missing)
        if errors:
            raise PipelineFailed(errors, ended)
        if unsent:
            raise unsent
    artifacts.publish(home)
    return outcomes


def _run(
    execution: Execution, graph: Graph, jobs: int, options: dict[str, Any], wanted: Collection[str]
) -> tuple[dict[str, Outcome], list[StageUserError | StageCrash]]:
    """Every stage of the graph; afterwards `dvc.lock` has the order of the graph. With `pull` the files of the stages
    `wanted` are fetched first, and what else the run needs."""
    root = execution.project.root
    before = recorded_order(root)
    try:
        with processes.session():
            if execution.pull:
                out = partial(execution.print, "")
                execution.fetched = remote.fetch(execution.project, graph, wanted, execution.force, out)
            execution.refresh_sources(graph)
            futures = _run_stages(execution, graph, places(jobs), options)
    finally:
        restore_order(root, graph.stages, before)
    outcomes = {stage: _outcome(execution, stage, futures[stage].state) for stage in graph.stages}
    errors = [error for stage in graph.stages if (error := _error(stage, futures[stage].state)) is not None]
    return outcomes, errors


def _run_stages(
    execution: Execution, graph: Graph, free: int, options: dict[str, Any]
) -> dict[str, PrefectFuture[Outcome]]:
    """Run each stage when those that it needs have ended at most `free` at the same time, in the order of the graph."""
    futures: dict[str, PrefectFuture[Outcome]] = {}
    running: dict[PrefectFuture[Outcome], str] = {}
    waiting, ended = list(graph.stages), set[str]()
    while waiting or running:
        ready = [stage for stage in waiting if ended.issuperset(graph.upstream[stage])]
        for stage in ready[: free - len(running)]:
            named = stage_task.with_options(name=stage, task_run_name=stage, **options)
            above = [futures[name] for name in graph.upstream[stage]]
            futures[stage] = cast(
                PrefectFuture[Outcome], named.submit(execution, stage, wait_for=above, return_state=False)
            )
            running[futures[stage]] = stage
            waiting.remove(stage)
        done = next(as_completed(list(running)))
        done.wait()  # else its state comes from Prefect's API, without the result
        stage = running.pop(done)
        ended.add(stage)
        terminal.end(_outcome(execution, stage, done.state))
    return futures


def _push(execution: Execution, graph: Graph, outcomes: dict[str, Outcome]) -> UserError | None:
    """Send the results of what ended well; returns why it failed."""
    ended = [name for name, outcome in outcomes.items() if outcome.state not in {FAILED, NOT_RUN}]
    names = [name for name in (*graph.all_sources(), *ended) if name not in execution.fetched.unneeded]
    execution.print("", f"sending results to {remote.require(execution.project.root, False, True)}")
    try:
        with processes.session():
            remote.push(execution.project.root, names, partial(execution.print, ""))
    except UserError as error:
        execution.print("", f"nothing or not all was sent: {error}")
        return UserError(f"{error}; the results are kept here, and the same command sends them")
    return None


def _error(stage: str, state: State[Outcome]) -> StageUserError | StageCrash | None:
    """Why a stage failed; None for one that ended well, or that never began."""
    if not state.is_failed() and not state.is_crashed():
        return None
    error: Any = state.result(raise_on_failure=False)
    if isinstance(error, StageUserError | StageCrash):
        return error
    return StageCrash(f"{stage}: {state.name}: {error if isinstance(error, BaseException) else state.message}")


def _outcome(execution: Execution, stage: str, state: State[Outcome]) -> Outcome:
    error = _error(stage, state)
    if error is not None:
        return Outcome(
            stage, FAILED, 0.0, str(error), execution.why.get(stage, ""), len(execution.failures[stage]) or 1
        )
    if not state.is_completed():
        return Outcome(stage, NOT_RUN, 0.0)
    return state.result()


def _printer() -> Print:
    """Sends each line to Prefect's log of the run, and to the terminal where it is open; an alert is also an event."""
    logger = get_run_logger()

    def send(stage: str, line: str) -> None:
        artifacts.announce_alert(stage, line)
        if terminal.is_shown(line):
            logger.info(f"{stage}: {line}" if stage and not line.startswith("[") else line)
            terminal.print_line(stage, line)

    return send
