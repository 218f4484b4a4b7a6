"""How a run goes: a Prefect flow with a task for each stage of dvc.yaml. `serve` pickles this module, so locks, events
and registries are kept in other modules."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture, as_completed
from prefect.states import Cancelled, Completed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.names import generate_slug

from flows import artifacts, driver, processes, remote, terminal
from flows.environment import find_root
from flows.graph import Graph, Project, brief
from flows.stages import (
    FAILED,
    NOT_RUN,
    UP_TO_DATE,
    Outcome,
    PipelineFailed,
    StageCrash,
    StageUserError,
    refresh_sources,
    run_stage,
)
from rlhf_core.errors import UserError
from tasks.stage.dvc_files import recorded_order, restore_order
from tasks.stage.gpus import visible_gpus
from tasks.stage.pipeline_run import finish
from tasks.tracking.settings import RUN_VARIABLE

Print = Callable[[str, str], None]
"""Receives a stage and one line about it."""


@dataclass
class Run:
    """What all stages of one run share."""

    project: Project
    force: bool
    timeout: float | None
    attempts: int
    """How often a stage may be tried."""
    print: Print
    pull: bool = False
    """Whether DVC's remote may give results."""
    needed: set[str] = field(default_factory=set)
    """With `pull`: the stages whose outputs must be here; the others are up to date without them."""
    failures: dict[str, list[str]] = field(default_factory=dict)
    """Stage -> why each attempt crashed."""


def places(jobs: int) -> int:
    """How many stages may run at the same time: never more than the GPUs. Without a GPU they share the CPU."""
    return min(jobs, len(visible_gpus()) or jobs)


def is_retriable(task: Any, run: Any, state: State[Any]) -> bool:
    """Whether a failed stage is tried again: not after a user's error."""
    return not isinstance(state.result(raise_on_failure=False), UserError)


@task(cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=is_retriable)
def stage_task(run: Run, stage: str) -> State[Outcome]:
    """Run one stage by DVC, unless it is up to date. Its Prefect state is named after what DVC did: Completed, UpToDate
    or Restored; or Cancelled. Raises as `run_stage`."""
    project, failures, on_line = run.project, run.failures.setdefault(stage, []), partial(run.print, stage)
    changed = ["--force"] if run.force else project.reasons(stage, allow_missing=run.pull)
    gone = project.missing(stage) if run.pull and not changed else []
    if stage not in run.needed:
        gone = [out for out in gone if not out.in_cache]
    why = brief(changed or [f"{out.path} missing" for out in gone])
    if failures:
        on_line(f"attempt {len(failures) + 1} of {run.attempts} after: {failures[-1]}")
    elif why:
        on_line(f"starts ({why})")
    else:
        return Completed(name=UP_TO_DATE, data=Outcome(stage, UP_TO_DATE, 0.0))
    options = ["--pull"] if run.pull and changed else []
    if gone and all(out.in_cache for out in gone):
        options = ["--pull", "--no-run-cache"]  # as dvc.lock has it
    key = None if run.force else project.key(stage)
    try:
        with driver.only_one(project.root, key, on_line) if key else nullcontext():
            outcome = run_stage(project.root, stage, run.force, run.timeout, on_line, options)
    except processes.Stopped:
        return Cancelled(message="stopped with the run")
    except StageCrash as error:
        failures.append(str(error).removeprefix(f"{stage}: "))
        raise
    outcome = replace(outcome, attempts=len(failures) + 1)
    return Completed(name=outcome.state, message=outcome.message or f"its reason: {why}", data=outcome)


def _name() -> str:
    """The name of an isolated run, else two words."""
    return os.environ.get(RUN_VARIABLE) or generate_slug(2)


@flow(
    name="leash",
    version=version("leash-rlhf"),
    flow_run_name=_name,
    task_runner=cast(Any, ThreadPoolTaskRunner()),  # a thread for each running stage reads the output of its process
    persist_result=False,
)
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
    with driver.exclusive(home) as project:
        graph = project.graph.select(stages)
        address = remote.require(home, pull, push)
        run = Run(project, force, timeout_seconds, retries + 1, _printer(), pull)
        say = partial(run.print, "")
        before = recorded_order(home)
        options = {"retries": retries, "retry_delay_seconds": retry_delay_seconds}
        try:
            with processes.session():
                # With `pull`, tracked data that are missing are fetched where a stage reads them.
                edited = [one for one in project.changed_sources(graph) if not pull or project.reasons(one, True)]
                refresh_sources(home, edited, say)
                if pull:
                    run.needed = remote.fetch(project, graph, stages or graph.stages, force, say)
                outcomes = _run_stages(run, graph, places(jobs), options)
            unsent = None
            if push:
                ended = [name for name, outcome in outcomes.items() if outcome.state not in {FAILED, NOT_RUN}]
                held = [name for name in (*graph.all_sources(), *ended) if not project.missing(name)]
                say(f"sending results to {address}")
                try:
                    with processes.session():
                        remote.push(home, held, say)
                except UserError as error:
                    say(f"nothing or not all was sent: {error}")
                    unsent = UserError(f"{error}; the results are kept here, and the same command sends them")
        except (KeyboardInterrupt, SystemExit):
            return Cancelled(message="stopped")
        finally:
            restore_order(home, graph.stages, before)
        if missing := finish(home):
            say(missing)
        if any(outcome.error for outcome in outcomes.values()):
            raise PipelineFailed(list(outcomes.values()))
        if unsent:
            raise unsent
    try:
        artifacts.publish(home)
    except Exception as error:  # all results are recorded; tables on a page are worth less
        get_run_logger().warning(f"Prefect took no tables of this run: {error}")
    return outcomes


def _run_stages(run: Run, graph: Graph, free: int, options: dict[str, Any]) -> dict[str, Outcome]:
    """Run each stage when those that it needs have ended, at most `free` at the same time, in the order of the graph.
    Returns how each ended."""
    progress = artifacts.progress(f"Of {len(graph.stages)} stages")
    futures: dict[str, PrefectFuture[Outcome]] = {}
    running: dict[PrefectFuture[Outcome], str] = {}
    ended: dict[str, Outcome] = {}
    waiting = list(graph.stages)
    while waiting or running:
        ready = [stage for stage in waiting if ended.keys() >= set(graph.upstream[stage])]
        for stage in ready[: free - len(running)]:
            named = stage_task.with_options(name=stage, task_run_name=stage, **options)
            above = [futures[name] for name in graph.upstream[stage]]
            futures[stage] = cast(PrefectFuture[Outcome], named.submit(run, stage, wait_for=above, return_state=False))
            running[futures[stage]] = stage
            waiting.remove(stage)
        done = next(as_completed(list(running)))
        done.wait()  # else its state comes from Prefect's API, without the result
        stage, state = running.pop(done), done.state
        if state.is_completed():
            ended[stage] = state.result()
        elif state.is_failed() or state.is_crashed():
            error: Any = state.result(raise_on_failure=False)
            if not isinstance(error, StageUserError | StageCrash):  # of Prefect, or a mistake of ours
                reason = error if isinstance(error, BaseException) else state.message
                error = StageCrash(f"{stage}: {state.name}: {reason}")
            ended[stage] = Outcome(stage, FAILED, 0.0, attempts=len(run.failures.get(stage, [])) or 1, error=error)
        else:  # it was stopped, or one that it needs has failed
            ended[stage] = Outcome(stage, NOT_RUN, 0.0)
        terminal.end(ended[stage])
        progress(100.0 * len(ended) / len(graph.stages))
    return {stage: ended[stage] for stage in graph.stages}


def _printer() -> Print:
    """Sends each line to Prefect's log of the run, and to the terminal where it is open; an alert is also an event."""
    logger = get_run_logger()

    def send(stage: str, line: str) -> None:
        artifacts.announce_alert(stage, line)
        if terminal.is_shown(line):
            logger.info(f"{stage}: {line}" if stage and not line.startswith("[") else line)
            terminal.print_line(stage, line)

    return send
