"""Runs one stage without Prefect: whether it needs a process, why, and which attempt it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from flows import processes
from flows.graph import Graph
from flows.remote import NOTHING_FETCHED, Fetched
from flows.stages import EXECUTED, UP_TO_DATE, Outcome, StageCrash, refresh_sources, run_stage
from flows.status import Project, brief
from rlhf_core.locks import FileLock, who_holds
from tasks.stage.gpus import visible_gpus
from tasks.tracking.settings import main_checkout

EXECUTIONS = Path("work") / "executions"
"""Locks of the executions at work, in the main checkout."""
POLL_SECONDS = 0.5

Print = Callable[[str, str], None]
"""Receives a stage and one line about it."""


@dataclass
class Execution:
    """What all stages of one run share."""

    project: Project
    force: bool
    timeout: float | None
    attempts: int
    """How often a stage may be tried."""
    print: Print
    fetched: Fetched = NOTHING_FETCHED
    """What DVC's remote gave."""
    pull: bool = False
    """Whether DVC's remote may give more."""
    fresh: set[str] = field(default_factory=set)
    """The stages that this run has computed from changed inputs, and of which a remote could have had the result."""
    why: dict[str, str] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)

    def run(self, stage: str) -> Outcome:
        """Run the stage, unless DVC's status says that it is up to date. Raises as `run_stage`."""
        failures = self.failures.setdefault(stage, [])
        if failures:
            self.print(stage, f"attempt {len(failures) + 1} of {self.attempts} after: {failures[-1]}")
        elif why := ["--force"] if self.force else self.project.reasons(stage):
            if self._is_known(stage) and (stage in self.fetched.unneeded or not self.project.missing(stage)):
                return Outcome(stage, UP_TO_DATE, 0.0, "what is missing of it is not needed")
            self.why[stage] = brief(why)
            self.print(stage, f"starts ({self.why[stage]})")
        else:
            return Outcome(stage, UP_TO_DATE, 0.0)
        try:
            with self._only_one(stage):
                outcome = run_stage(
                    self.project.root, stage, self.force, self.timeout, lambda line: self.print(stage, line),
                    self._pull_options(stage),
                )  # fmt: skip
        except StageCrash as error:
            failures.append(str(error).removeprefix(f"{stage}: "))
            raise
        if outcome.state == EXECUTED and stage not in self.fetched.recorded and self.project.can_be_shared(stage):
            self.fresh.add(stage)
        return replace(outcome, why=self.why[stage], attempts=len(failures) + 1)

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

    def _pull_options(self, stage: str) -> tuple[str, ...]:
        """Without `--no-run-cache` DVC copies the remote's whole run cache, to look for results of these inputs. Inputs
        that this run has computed have none there: whoever sent one has sent the result above, too."""
        if not self.pull or self.force or not self.fresh.isdisjoint(self.project.graph.upstream[stage]):
            return ()
        if not (stage in self.fetched.recorded and self.project.is_recorded(stage)):
            return ("--pull",)
        return ("--pull", "--no-run-cache") if self._is_known(stage) else ()

    def _is_known(self, stage: str) -> bool:
        """Whether dvc.lock has the result of the stage, also for what the stages before it have given since; and it is
        in DVC's cache, or not needed."""
        known = self.fetched.ready | self.fetched.unneeded
        return stage in known and self.project.is_recorded(stage)

    def refresh_sources(self, graph: Graph) -> None:
        """Record the new contents of tracked data files that were edited. Raises StageUserError when one is missing."""
        changed = self.project.changed_sources(graph)
        changed = tuple(name for name in changed if name not in self.fetched.unneeded)
        refresh_sources(self.project.root, changed, lambda line: self.print("", line))


def places(jobs: int) -> int:
    """How many stages may run at the same time: never more than the GPUs. Without a GPU they share the CPU."""
    return min(jobs, len(visible_gpus()) or jobs)
