"""The Prefect flow: the graph of `dvc.yaml`, a task a stage, independent stages side by side. Prefect decides when;
what runs and what is cached is DVC's affair (`stages.py`). No locks, events or registries here: `serve` pickles this
module."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture, wait
from prefect.states import Completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows import artifacts, driver, lifeline, lockfile, processes, rwlock, terminal
from flows.environment import find_root
from flows.graph import Graph, read_graph
from flows.stages import (
    FAILED,
    NOT_RUN,
    Outcome,
    PipelineFailed,
    StageCrash,
    StageUserError,
    refresh_sources,
    run_stage,
)
from rlhf_core.errors import UserError
from tasks.stage.pipeline_run import finish


def may_pass(task: Any, run: Any, state: State[Any]) -> bool:
    """Whether to try a failed stage again: not after a user's error, nor when somebody stopped the run."""
    error = state.result(raise_on_failure=False)
    return not isinstance(error, UserError | processes.Stopped)


@task(cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=may_pass)
def stage_task(root: str, stage: str, force: bool, timeout: float | None) -> State[Outcome]:
    """One stage, in a Prefect state named after what DVC did: Completed, UpToDate or Restored."""
    outcome = run_stage(Path(root), stage, force, timeout, _listener(stage))
    return Completed(name=outcome.state, message=outcome.message or None, data=outcome)


def _side_by_side() -> TaskRunner[PrefectFuture[Any]]:
    """A thread for each stage: the work is done in processes, the threads only listen."""
    runner: ThreadPoolTaskRunner[Any] = ThreadPoolTaskRunner()
    return cast(TaskRunner[PrefectFuture[Any]], runner)


@flow(name="leash", task_runner=_side_by_side(), persist_result=False)
def pipeline(
    stages: list[str] | None = None,
    force: bool = False,
    root: str | None = None,
    retries: int = 2,
    retry_delay_seconds: float = 10.0,
    timeout_seconds: float | None = None,
) -> dict[str, Outcome]:
    """Run `stages` and what they need (all, for none) and return how each ended, in the order of the graph.

    `root` is the project (default: found from the current folder upwards); `timeout_seconds` bounds each stage.
    Raises UserError before anything starts (an unknown stage, another run at work here), PipelineFailed when a stage
    failed; then nothing that needs it has run.
    """
    home = find_root(Path(root) if root else None)
    options = {"retries": retries, "retry_delay_seconds": retry_delay_seconds}
    with driver.sole(home), lifeline.tied() as ended:
        outcomes, errors = _run(home, read_graph(home).select(stages), force, timeout_seconds, options)
        ended.extend(outcomes.values())
        finish_tracking(home, ended)
        if errors:
            raise PipelineFailed(errors, ended)
    artifacts.publish(home)
    return outcomes


def _run(
    root: Path, graph: Graph, force: bool, timeout: float | None, options: dict[str, Any]
) -> tuple[dict[str, Outcome], list[StageUserError | StageCrash]]:
    """Every stage of the graph, and what `dvc.lock` looks like afterwards."""
    before = lockfile.entries(root)
    hear = _listener("")
    try:
        with processes.session():
            for remark in rwlock.sweep(root):
                hear(remark)
            refresh_sources(root, graph.all_sources(), hear)
            futures = _submit(root, graph, force, timeout, options)
            wait(list(futures.values()))
    finally:
        lockfile.restore_order(root, graph, before)
    outcomes = {stage: _outcome(stage, future.state) for stage, future in futures.items()}
    errors = [error for stage, future in futures.items() if (error := _error(stage, future.state)) is not None]
    return outcomes, errors


def finish_tracking(root: Path, outcomes: list[Outcome]) -> None:
    """Close the parent run of this pipeline run, and send to MLflow what it has not received."""
    done = [outcome.stage for outcome in outcomes if outcome.state not in {FAILED, NOT_RUN}]
    if waiting := finish(root, "FINISHED" if len(done) == len(outcomes) else "FAILED", done):
        get_run_logger().warning(waiting)


def _submit(
    root: Path, graph: Graph, force: bool, timeout: float | None, options: dict[str, Any]
) -> dict[str, PrefectFuture[Outcome]]:
    """Every stage at once; each waits for those whose outputs it reads."""
    futures: dict[str, PrefectFuture[Outcome]] = {}
    for stage in graph.stages:
        named = stage_task.with_options(name=stage, task_run_name=stage, **options)
        above = [futures[name] for name in graph.upstream[stage]]
        future = named.submit(str(root), stage, force, timeout, wait_for=above, return_state=False)
        futures[stage] = cast(PrefectFuture[Outcome], future)
    return futures


def _error(stage: str, state: State[Outcome]) -> StageUserError | StageCrash | None:
    """Why a stage failed; None for one that ended well, or that never began."""
    if not state.is_failed() and not state.is_crashed():
        return None
    error: Any = state.result(raise_on_failure=False)
    if isinstance(error, StageUserError | StageCrash):
        return error
    return StageCrash(f"{stage}: {state.name}: {error if isinstance(error, BaseException) else state.message}")


def _outcome(stage: str, state: State[Outcome]) -> Outcome:
    error = _error(stage, state)
    if error is not None:
        return Outcome(stage, FAILED, 0.0, str(error))
    if not state.is_completed():
        return Outcome(stage, NOT_RUN, 0.0)
    return state.result()


def _listener(stage: str) -> Callable[[str], None]:
    """Each live line goes to Prefect's log of the run, and to the terminal when a person sits there."""
    logger = get_run_logger()

    def hear(line: str) -> None:
        if terminal.worth_saying(line):
            logger.info(line)
            terminal.say(stage, line)

    return hear
