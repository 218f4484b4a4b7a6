"""Runs one stage without Prefect: whether it needs a process, why, on which GPU, and which attempt it is."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flows.graph import Graph
from flows.remote import NOTHING_FETCHED, Fetched
from flows.stages import EXECUTED, UNCHANGED, UP_TO_DATE, Outcome, StageCrash, refresh_sources, run_stage
from flows.status import Project, brief

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
    """The stages that this run has computed from changed inputs."""
    why: dict[str, str] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)

    def run(self, stage: str, gpu: str | None) -> Outcome:
        """Run the stage, unless DVC's status says that it is up to date. Raises as `run_stage`."""
        failures = self.failures.setdefault(stage, [])
        if failures:
            self.print(stage, f"attempt {len(failures) + 1} of {self.attempts} after: {failures[-1]}")
        elif why := ["--force"] if self.force else self.project.reasons(stage):
            if self._is_known(stage) and (stage in self.fetched.unneeded or not self.project.missing(stage)):
                return Outcome(stage, UP_TO_DATE, 0.0, "what is missing of it is not needed")
            self.why[stage] = brief(why)
            self.print(stage, f"starts ({self.why[stage]})" + (f" on GPU {gpu}" if gpu else ""))
        else:
            return Outcome(stage, UP_TO_DATE, 0.0)
        environment = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else UNCHANGED
        try:
            outcome = run_stage(
                self.project.root, stage, self.force, self.timeout, lambda line: self.print(stage, line),
                self._pull_options(stage), environment,
            )  # fmt: skip
        except StageCrash as error:
            failures.append(str(error).removeprefix(f"{stage}: "))
            raise
        if outcome.state == EXECUTED and stage not in self.fetched.recorded:
            self.fresh.add(stage)
        return replace(outcome, why=self.why[stage], attempts=len(failures) + 1)

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


def gpus_for(jobs: int) -> list[str | None]:
    """One entry for each stage that may run at the same time: the GPU that it gets, or None for no choice.

    One stage at a time chooses from all visible GPUs. Stages side by side get one each, and are never more than the
    GPUs; without a GPU they share the CPU.
    """
    if jobs == 1:
        return [None]
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",")[:count] if named else [str(index) for index in range(count)]
    return [*gpus[:jobs]] or [None] * jobs
