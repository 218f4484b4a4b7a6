"""How a run goes: a Prefect flow with a task for each stage of dvc.yaml. `serve` pickles this module, so locks, events
and registries are kept in other modules."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture, as_completed
from prefect.states import Cancelled, Completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
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
from rlhf_core.locks import FileLock, who_holds
from tasks.stage.dvc_files import recorded_order, restore_order
from tasks.stage.gpus import visible_gpus
from tasks.stage.pipeline_run import finish
from tasks.tracking.settings import RUN_VARIABLE, main_checkout

EXECUTIONS = Path("work") / "executions"
"""Locks of the executions at work, in the main checkout."""
POLL_SECONDS = 0.5

Print = Callable[[str, str], None]
"""Receives a stage and one line about it."""


@dataclass
class Execution:
    """What all stages of one run share, and how one of them runs."""

    project: Project
    force: bool
    timeout: float | None
    attempts: int
    """How often a stage may be tried."""
    print: Print
    pull: bool = False
    """Whether DVC's remote may give results."""
    wanted: set[str] = field(default_factory=set)
    """With `pull`: the stages whose outputs must be here at the end; those of the others only where they are read."""
    brought: dict[str, Outcome] = field(default_factory=dict)
    """Stages that were first up to date without their outputs, which another one needed then."""
    bringing: Any = field(default_factory=threading.RLock)
    """Held while inputs are brought: two stages may read the same one."""
    why: dict[str, str] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)

    def run(self, stage: str) -> Outcome:
        """Run the stage by DVC, unless it is up to date. Raises as `run_stage`."""
        failures = self.failures.setdefault(stage, [])
        changed = ["--force"] if self.force else self.project.reasons(stage, allow_missing=self.pull)
        gone = self.project.missing(stage) if self.pull and not changed else []
        if stage not in self.wanted:  # DVC can bring it later, where a stage reads it
            gone = [out for out in gone if not out.in_cache]
        if failures:
            self.print(stage, f"attempt {len(failures) + 1} of {self.attempts} after: {failures[-1]}")
        elif why := changed or [f"{out.path} missing" for out in gone]:
            self.why[stage] = brief(why)
            self.print(stage, f"starts ({self.why[stage]})")
        else:
            return Outcome(stage, UP_TO_DATE, 0.0)
        fetched = bool(gone) and all(out.in_cache for out in gone)
        options = ["--pull", "--no-run-cache"] if fetched else ["--pull"] if self.pull and changed else []
        run = partial(
            run_stage, self.project.root, stage, self.force, self.timeout, partial(self.print, stage), options
        )
        try:
            with self._only_one(stage):
                if self.pull and changed:
                    self._bring_inputs(stage)
                try:
                    outcome = run()
                except StageUserError:
                    if not (fetched and self._bring_inputs(stage)):
                        raise
                    self.print(stage, "is computed: DVC's remote lacks its result")
                    outcome = run()
        except StageCrash as error:
            failures.append(str(error).removeprefix(f"{stage}: "))
            raise
        return replace(outcome, why=self.why[stage], attempts=len(failures) + 1)

    def _bring_inputs(self, stage: str) -> bool:
        """Fetch, or compute, what the stage reads and is not here; returns whether there was something."""
        graph = self.project.graph
        with self.bringing:
            sources = [name for name in graph.sources[stage] if self.project.missing(name)]
            if sources:
                try:
                    remote.pull(self.project.root, sources, partial(self.print, stage))
                except UserError as error:
                    raise StageUserError(f"{stage}: {', '.join(sources)}: {error}") from None
            stages = [name for name in graph.upstream[stage] if self.project.missing(name)]
            for name in stages:
                self.wanted.add(name)
                self.brought[name] = self.run(name)
                terminal.end(self.brought[name])
        return bool(sources or stages)

    @contextmanager
    def _only_one(self, stage: str) -> Iterator[None]:
        """Wait while another workspace of this checkout runs the stage with the same inputs: DVC then restores what it
        has made. Raises processes.Stopped."""
        key = None if self.force else self.project.key(stage)
        if key is None:
            yield
            return
        path = main_checkout(self.project.root) / EXECUTIONS / f"{key[:32]}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        if not lock.acquire():
            self.print(stage, f"waits for its result from another workspace ({who_holds(path)})")
            while not lock.acquire(POLL_SECONDS):
                processes.raise_if_stopped()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # at worst two that wait run the stage both
            lock.release()


def places(jobs: int) -> int:
    """How many stages may run at the same time: never more than the GPUs. Without a GPU they share the CPU."""
    return min(jobs, len(visible_gpus()) or jobs)


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


@flow(name="leash", version=version("leash-rlhf"), flow_run_name=_name, task_runner=_threads(), persist_result=False)
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
        wanted = set(stages or graph.stages)
        execution = Execution(project, force, timeout_seconds, retries + 1, _printer(), pull, wanted)
        try:
            outcomes, errors = _run(execution, graph, jobs, options)
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
    execution: Execution, graph: Graph, jobs: int, options: dict[str, Any]
) -> tuple[dict[str, Outcome], list[StageUserError | StageCrash]]:
    """Every stage of the graph; afterwards `dvc.lock` has the order of the graph."""
    root = execution.project.root
    before = recorded_order(root)
    try:
        with processes.session():
            changed = execution.project.changed_sources(graph)
            if execution.pull:  # what is missing is fetched where a stage reads it
                changed = tuple(name for name in changed if execution.project.reasons(name, allow_missing=True))
            refresh_sources(root, changed, partial(execution.print, ""))
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
    progress = _start_progress(len(graph.stages))
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
        progress(len(ended))
    return futures


def _start_progress(stages: int) -> Callable[[int], None]:
    """Prefect's artifact `leash-progress`; the function that it returns is called with the number of ended stages. A
    thread of its own sends it: a lost server neither stops nor delays the run."""
    try:
        artifact = cast(UUID, create_progress_artifact(0.0, key="leash-progress", description=f"Of {stages} stages"))
    except Exception:
        return lambda ended: None

    def send(percent: float) -> None:
        with suppress(Exception):
            update_progress_artifact(artifact, percent)

    def show(ended: int) -> None:
        thread = threading.Thread(target=send, args=(100.0 * ended / stages,), daemon=True)
        thread.start()
        if ended == stages:
            thread.join(timeout=5.0)

    return show


def _push(execution: Execution, graph: Graph, outcomes: dict[str, Outcome]) -> UserError | None:
    """Send the results of what ended well; returns why it failed."""
    ended = [name for name, outcome in outcomes.items() if outcome.state not in {FAILED, NOT_RUN}]
    held = [name for name in (*graph.all_sources(), *ended) if not execution.project.missing(name)]
    execution.print("", f"sending results to {remote.require(execution.project.root, False, True)}")
    try:
        with processes.session():
            remote.push(execution.project.root, held, partial(execution.print, ""))
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
    return execution.brought.get(stage) or state.result()


def _printer() -> Print:
    """Sends each line to Prefect's log of the run, and to the terminal where it is open; an alert is also an event."""
    logger = get_run_logger()

    def send(stage: str, line: str) -> None:
        artifacts.announce_alert(stage, line)
        if terminal.is_shown(line):
            logger.info(f"{stage}: {line}" if stage and not line.startswith("[") else line)
            terminal.print_line(stage, line)

    return send
