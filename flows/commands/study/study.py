"""`leash study`: the pipeline with several settings and training seeds, each in an isolated workspace, and tables that
compare them. `work/studies/NAME` holds what it was called with, the logs, the tables and the picture."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from flows import processes, server, workspace
from flows.commands.study import expressions, grid, picture, tables
from flows.commands.study.grid import Combination, Space
from flows.commands.study.results import FAILED, FINISHED, Trial
from flows.commands.study.search import Search, Suggestion
from flows.commands.study.tables import Aim
from flows.commands.study.trials import Runner, run_all, screen
from flows.isolated import as_name
from flows.pool import Pool, connect
from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from rlhf_core.locks import FileLock, holder
from tasks.tracking.record import Status
from tasks.tracking.sync import begin_study, finish_study

STUDIES = Path("work") / "studies"
CALL = "study.json"
TABLE = "table.md"
PICTURE = "frontier.png"
DEFAULT_OBJECTIVE = "gold_policy"
POOL_JOBS = 8
"""Trials that wait in a work pool, or run there, at the same time."""
MOST_DRAWN = 12
"""Settings in the picture; with more, the best are drawn."""


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
    def aim(self) -> Aim:
        """What is best; by default nothing, or the gold score where there is a search."""
        return Aim(self.objective or (DEFAULT_OBJECTIVE if self.search else None), self.constraint, self.maximise)

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
    trials: list[Trial] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Of its tables and logs."""
        return self.home / STUDIES / self.name

    def add(self, combinations: Sequence[Combination]) -> list[Trial]:
        """The trial of each combination; those that were not known are added. Raises UserError for refused
        parameters."""
        known = {trial.name: trial for trial in self.trials}
        new = [one for one in combinations if one.name not in known]
        params = grid.check(self.home, self.commit, new)
        for one in new:
            known[one.name] = Trial(one, params[one.name])
            self.trials.append(known[one.name])
        return [known[one.name] for one in combinations]

    def write(self) -> str:
        """Write tables and picture of what is there now; returns the tables."""
        text = tables.report(self.call.aim, self.trials)
        with atomic(self.folder / TABLE) as place:
            place.write_text(text + "\n", encoding="utf-8")
        best = tables.best_settings(self.call.aim, self.trials, MOST_DRAWN)
        if (drawn := picture.draw(best)) is not None:
            with atomic(self.folder / PICTURE) as place:
                place.write_bytes(drawn)
        return text


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
        with processes.keeping(lock.descriptor), screen(made.trials) as show:
            _run(made, places, show, tuple(options), workers)
        text = made.write()
    finally:
        lock.release()
        close(made)
    failed = sum(trial.state == FAILED for trial in made.trials)
    print(f"\n{text}\n\ntables and picture: {made.folder}", flush=True)
    print("`dvc exp show` lists the experiments; `dvc exp apply NAME` brings one's results into this folder")
    return 1 if failed else 0


def prepare(home: Path, call: Call, name: str | None, revision: str) -> Study:
    """A new study, or the one of this name with its commit. Raises UserError as `study`."""
    space = grid.read_space(call.overrides, call.methods)
    for expression in filter(None, (call.objective, call.constraint)):
        expressions.check(expression)
    if call.search and not space.varied:
        raise UserError("--search needs a parameter to vary, such as -S 'ppo.kl.coef=interval(0.02,0.5)'")
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


def _run(
    made: Study, jobs: int, show: Callable[[Trial, str], None], options: tuple[str, ...], pool: Pool | None
) -> None:
    with processes.session() if pool else _prefect(made.home) as variables:
        logs = made.folder / "logs"
        runner = Runner(made.home, made.name, made.commit, logs, variables or {}, options, pool, show)
        if made.call.search is None:
            waiting = iter(made.trials)
            run_all(runner, jobs, lambda: next(waiting, None), lambda trial: made.write())
        else:
            searching = Searching(made, Search(made.folder, made.space, made.call.search, made.call.maximise))
            run_all(runner, jobs, searching.ask, searching.ended)


@contextmanager
def _prefect(home: Path) -> Iterator[dict[str, str]]:
    """The Prefect server of all trials, which inherit it: the configured one, or one that ends with the block."""
    if server.configured_url(home) is None:
        server.wait_for_temporary(server.start_temporary(home))
    else:
        server.require(home)
    try:
        yield {}
    finally:
        server.stop_temporary()


@dataclass
class Searching:
    """Feeds the trials of a search: each suggestion becomes a trial for each seed, and Optuna gets the means."""

    study: Study
    search: Search
    pending: list[Trial] = field(default_factory=list)
    open: list[tuple[Suggestion, list[Trial]]] = field(default_factory=list)
    began: int = 0

    def __post_init__(self) -> None:
        """List the settings of earlier processes: their experiments are there, or they are run again."""
        for values in self.search.tried():
            self._add(values)
            self.began += 1

    def ask(self) -> Trial | None:
        """The next trial; None when the budget is used, or when the metrics do not have the objective."""
        ended = [trial for trial in self.study.trials if trial.state == FINISHED]
        if ended and all(tables.unmeasured(self.study.call.aim, [trial]) for trial in ended):
            return None
        while not self.pending and (suggestion := self.search.next(self.began)) is not None:
            self.began += 1
            self.open.append((suggestion, self._add(suggestion.values)))
            self._tell()  # it may be known
        return self.pending.pop(0) if self.pending else None

    def _add(self, values: Sequence[str]) -> list[Trial]:
        before = len(self.study.trials)
        trials = self.study.add(grid.with_seeds(self.study.name, self.study.space, values))
        self.pending += self.study.trials[before:]
        return trials

    def ended(self, trial: Trial) -> None:
        """Give Optuna what is known, and write the tables."""
        self._tell()
        self.study.write()

    def _tell(self) -> None:
        """Give Optuna the mean objective and violation of each setting whose trials have all ended; None where a trial
        failed or lacks one of them."""
        aim = self.study.call.aim
        for suggestion, trials in list(self.open):
            if any(one.state not in {FINISHED, FAILED} for one in trials):
                continue
            self.open.remove((suggestion, trials))
            if any(one.state == FAILED for one in trials) or tables.unmeasured(aim, trials):
                self.search.tell(suggestion, None)
                continue
            objective = fmean(expressions.evaluate(str(aim.objective), trial.metrics) for trial in trials)
            constraint = aim.constraint
            self.search.tell(
                suggestion,
                objective,
                None if constraint is None else fmean(expressions.violation(constraint, one.metrics) for one in trials),
            )


def close(made: Study) -> None:
    """End the study's run in MLflow."""
    states = [trial.state for trial in made.trials]
    status: Status = "FINISHED" if all(state == FINISHED for state in states) else "FAILED"
    counts = {f"trials_{state}": float(states.count(state)) for state in (FINISHED, FAILED)}
    with suppress(OSError):
        finish_study(made.home, made.name, status, counts, [made.folder / TABLE, made.folder / PICTURE])
