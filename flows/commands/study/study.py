"""`leash study`: the pipeline with several settings and training seeds, each in an isolated workspace, and a page that
compares them. `work/studies/NAME` holds what it was called with, the logs, and the page."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from flows import processes, server, workspace
from flows.commands.study import expressions, grid, page, tables, trials
from flows.commands.study.grid import Combination, Space
from flows.commands.study.results import StudyInfo, Trial, read_metrics, read_tables
from flows.commands.study.search import Search, Suggestion
from flows.commands.study.trials import FAILED, FINISHED, Job, Runner
from flows.guardian import Guardian
from flows.isolated import as_name
from flows.pool import Pool, connect
from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from rlhf_core.locks import FileLock, holder
from tasks.tracking.record import Status
from tasks.tracking.sync import begin_study, finish_study

STUDIES = Path("work") / "studies"
CALL = "study.json"
PAGE = "index.html"
TABLE = "table.md"
DEFAULT_OBJECTIVE = "gold_policy"
POOL_JOBS = 8
"""Trials that wait in a work pool, or run there, at the same time."""


@dataclass(frozen=True)
class Call:
    """What a study was called with; an equal call continues it."""

    overrides: tuple[str, ...]
    methods: tuple[str, ...] = ()
    search: int | None = None
    objective: str | None = None
    """An expression over the metrics; None: gold_policy for a search, none otherwise."""
    constraint: str | None = None
    maximise: bool = True

    @property
    def aim(self) -> str | None:
        """The objective, given or by default."""
        return self.objective or (DEFAULT_OBJECTIVE if self.search else None)

    def command(self, name: str) -> str:
        """The command line."""
        words = ["leash", "study", *(word for one in self.overrides for word in ("-S", one)), "--name", name]
        words += ["--methods", ",".join(self.methods)] if self.methods else []
        words += ["--search", str(self.search)] if self.search else []
        words += ["--objective", self.objective] if self.objective else []
        words += ["--constraint", self.constraint] if self.constraint else []
        words += [] if self.maximise else ["--minimise"]
        return shlex.join(words)


@dataclass
class Study:
    """One study: its folder, its commit, and its jobs in the order of their start."""

    home: Path
    name: str
    commit: str
    call: Call
    space: Space
    jobs: list[Job] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Of its page and logs."""
        return self.home / STUDIES / self.name

    @property
    def info(self) -> StudyInfo:
        """What its page says about it."""
        call = self.call
        return StudyInfo(
            name=self.name, commit=self.commit, command=call.command(self.name), objective=call.aim,
            constraint=call.constraint, maximise=call.maximise,
        )  # fmt: skip

    def add(self, combinations: Sequence[Combination]) -> list[Job]:
        """The job of each combination; those that were not known are added. Raises UserError for refused parameters."""
        known = {job.name: job for job in self.jobs}
        params = grid.check(self.home, self.commit, [one for one in combinations if one.name not in known])
        self.jobs += [Job(one, params[one.name]) for one in combinations if one.name not in known]
        known = {job.name: job for job in self.jobs}
        return [known[one.name] for one in combinations]

    def trials(self) -> list[Trial]:
        """Every job as its page shows it."""
        return [as_trial(job) for job in self.jobs]


def study(
    home: Path,
    call: Call,
    name: str | None,
    revision: str,
    jobs: int | None,
    options: Sequence[str] = (),
    pool: str | None = None,
) -> int:
    """Run the study's trials, or those that are missing; returns the exit code: 1 when a trial failed. `options` are
    those of `leash run`; `jobs` trials run side by side (None: one here, `POOL_JOBS` on the workers of `pool`).

    Raises UserError before anything runs: for a wrong override, name, method or expression, another study of this
    name, or a work pool that cannot be used.
    """
    made = prepare(home, call, name, revision)
    lock = FileLock(made.folder / "study.lock")
    if not lock.acquire():
        raise UserError(f"process {holder(made.folder / 'study.lock')} runs study {made.name}; wait for its end")
    try:
        workers = connect(home, pool, made.commit) if pool else None
        with suppress(OSError):
            begin_study(home, made.name)
        places = jobs or (POOL_JOBS if pool else 1)
        with processes.watched(Guardian(lock.descriptor)), trials.screen(made.jobs) as show:
            _run(made, places, show, tuple(options), workers)
        write_page(made)
    finally:
        lock.release()
        close(made)
    failed = sum(job.state == FAILED for job in made.jobs)
    print(f"\n{page.markdown(made.info, made.trials())}\n\npage   {made.folder / PAGE}", flush=True)
    print("`dvc exp show` lists the experiments; `dvc exp apply NAME` brings one's results into this folder")
    return 1 if failed else 0


def prepare(home: Path, call: Call, name: str | None, revision: str) -> Study:
    """A new study, or the one of this name with its commit. Raises UserError as `study`."""
    space = grid.read_space(call.overrides, call.methods)
    for expression in filter(None, (call.objective, call.constraint)):
        expressions.check(expression)
    commit = workspace.resolve(home, revision)
    name = as_name(name) if name else grid.default_name(space, commit)
    path = home / STUDIES / name / CALL
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    wanted = json.loads(json.dumps(asdict(call)))
    if recorded and identity(recorded["call"]) != identity(wanted):
        raise UserError(f"study {name} was begun as `{recorded['command']}`; call it so, or choose another --name")
    commit = recorded["commit"] if recorded else commit
    made = Study(home, name, commit, call, space)
    first = grid.grid(name, space) if call.search is None else []
    made.add(first)
    with atomic(path) as place:
        content = {"commit": commit, "call": wanted, "command": call.command(name)}
        place.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"study {name} {'continues ' if recorded else ''}at commit {commit[:12]}", flush=True)
    return made


def identity(call: dict[str, Any]) -> dict[str, Any]:
    """What a later call of the same study must repeat: without a search the objective may change."""
    free = () if call.get("search") else ("objective", "constraint", "maximise")
    return {name: value for name, value in call.items() if name not in free}


def _run(made: Study, jobs: int, show: Callable[[Job, str], None], options: tuple[str, ...], pool: Pool | None) -> None:
    with processes.session() if pool else _prefect(made.home) as variables:
        logs = made.folder / "logs"
        runner = Runner(made.home, made.name, made.commit, logs, variables or {}, options, pool, show)
        if made.call.search is None:
            waiting = iter(made.jobs)
            trials.run_all(runner, jobs, lambda: next(waiting, None), lambda job: write_page(made))
        else:
            searching = Searching(made, Search(made.folder, made.space, made.call.search, made.call.maximise))
            trials.run_all(runner, jobs, searching.ask, searching.ended)


@contextmanager
def _prefect(home: Path) -> Iterator[dict[str, str]]:
    """Variables that name the Prefect server of all trials: the configured one, or one that ends with the block."""
    url = server.configured_url(home)
    if url is None:
        url = server.start_temporary(home)
        server.wait_for_temporary(url)
    try:
        yield {"PREFECT_API_URL": url}
    finally:
        server.stop_temporary()


@dataclass
class Searching:
    """Feeds the trials of a search: each suggestion becomes a job for each seed, and Optuna gets the means."""

    study: Study
    search: Search
    pending: list[Job] = field(default_factory=list)
    open: list[tuple[Suggestion, list[Job]]] = field(default_factory=list)
    began: int = 0

    def __post_init__(self) -> None:
        """List the settings of earlier processes: their experiments are there, or they are run again."""
        for values in self.search.tried():
            self._add(values)
            self.began += 1

    def ask(self) -> Job | None:
        """The next job; None when the budget is used, or when the metrics do not have the objective."""
        ended = [as_trial(job) for job in self.study.jobs if job.state == FINISHED]
        if ended and all(tables.unmeasured(self.study.info, [trial]) for trial in ended):
            return None
        while not self.pending and (suggestion := self.search.next(self.began)) is not None:
            self.began += 1
            self.open.append((suggestion, self._add(suggestion.values)))
            self._tell()  # it may be known
        return self.pending.pop(0) if self.pending else None

    def _add(self, values: Sequence[str]) -> list[Job]:
        before = len(self.study.jobs)
        jobs = self.study.add(grid.with_seeds(self.study.name, self.study.space, values))
        self.pending += self.study.jobs[before:]
        return jobs

    def ended(self, job: Job) -> None:
        """Give Optuna what is known, and write the page."""
        self._tell()
        write_page(self.study)

    def _tell(self) -> None:
        """Give Optuna the mean of each setting whose jobs have all ended."""
        for suggestion, jobs in list(self.open):
            if all(one.state in {FINISHED, FAILED} for one in jobs):
                self.open.remove((suggestion, jobs))
                self.search.tell(suggestion, *self._measure(jobs))

    def _measure(self, jobs: Sequence[Job]) -> tuple[float | None, float | None]:
        """Means of the objective and of the violation over the seeds; None where one of them has none."""
        info, found = self.study.info, [as_trial(job) for job in jobs if job.state == FINISHED]
        if len(found) < len(jobs) or tables.unmeasured(info, found):
            return None, None
        objective = fmean(expressions.evaluate(str(info.objective), trial.metrics) for trial in found)
        if info.constraint is None:
            return objective, None
        return objective, fmean(expressions.violation(info.constraint, trial.metrics) for trial in found)


def as_trial(job: Job) -> Trial:
    """A job as the page shows it."""
    seed = job.trial.seed if job.trial.seed is not None else int(job.params["seed"])
    return Trial(
        job.name, grid.as_values(job.trial.setting, job.params), seed, job.state, read_metrics(job.files),
        read_tables(job.files), job.params, job.seconds, job.message,
    )  # fmt: skip


def write_page(made: Study) -> None:
    """The page and the table of what is there now."""
    found = made.trials()
    page.write(made.folder / PAGE, made.info, found)
    with atomic(made.folder / TABLE) as place:
        place.write_text(page.markdown(made.info, found) + "\n", encoding="utf-8")


def close(made: Study) -> None:
    """End the study's run in MLflow."""
    states = [job.state for job in made.jobs]
    status: Status = "FINISHED" if all(state == FINISHED for state in states) else "FAILED"
    counts = {f"trials_{state}": float(states.count(state)) for state in (FINISHED, FAILED)}
    with suppress(OSError):
        finish_study(made.home, made.name, status, counts, [made.folder / PAGE, made.folder / TABLE])
