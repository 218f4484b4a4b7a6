"""`leash study`: the pipeline with several settings and training seeds, each trial in an isolated workspace, and tables
that compare them. `work/studies/NAME` holds what it was called with, the logs, the tables and the picture."""

import io
import json
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from optuna.trial import TrialState
from ruamel.yaml import YAML

from flows import driver, isolated, processes, server, workspace
from flows.commands.study import expressions, file, leaderboard, picture, tables, trials
from flows.commands.study.trials import FAILED, FINISHED, RUNNING, WAITING, Call, Search, Space, Trial
from flows.isolated import as_name
from flows.pool import Pool, TrialFailed, connect
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from rlhf_core.locks import held
from tasks.params.loader import PARAMS_FILE, parse_yaml
from tasks.records.recorded import read_results
from tasks.stage.progress import duration
from tasks.tracking.record import Status
from tasks.tracking.settings import STUDY_VARIABLE, study_label, without_credentials
from tasks.tracking.sync import record_study

STUDIES = Path("work") / "studies"
CALL, SUGGESTED, TABLE, PICTURE = "study.json", "search.json", "table.md", "frontier.png"
POOL_JOBS = 8
"""Trials that wait in a work pool, or run there, at the same time."""
MOST_DRAWN = 12
"""Settings in the picture; with more, the best are drawn."""


@dataclass
class Study:
    """One study: its folder, its commit, and its trials in the order of their start, run by several threads."""

    home: Path
    name: str
    commit: str
    call: Call
    space: Space
    trials: list[Trial] = field(default_factory=list)
    jobs: int = 1
    """How many trials run side by side, on the workers of `pool` or here."""
    options: tuple[str, ...] = ()
    """Of `leash run`."""
    pool: Pool | None = None

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        """Of the list of trials, the tables, Optuna and the terminal."""

    @property
    def folder(self) -> Path:
        """Of its tables and logs."""
        return self.home / STUDIES / self.name

    @property
    def label(self) -> str:
        """By which MLflow finds the run of the study."""
        return study_label(self.home, self.name)

    def run(self) -> None:
        """Run all trials, `jobs` at a time. An interrupt stops all of them; they continue with the next call."""
        seeds = max(1, len(self.space.seeds))
        with (
            ThreadPoolExecutor(self.jobs) as places,
            ThreadPoolExecutor(-(-self.jobs // seeds)) as settings,
            processes.session(),
        ):
            if self.call.search is None:
                work = [places.submit(self.run_trial, trial) for trial in self.trials]
            else:
                search = Search(self.folder / SUGGESTED, self.space, self.call.search, self.call.maximise)
                work = [settings.submit(self.try_next, search, places) for _ in range(self.call.search)]
            for ended in as_completed(work):
                ended.result()

    def try_next(self, search: Search, places: ThreadPoolExecutor) -> None:
        """Run the next setting of a search with each seed, and give Optuna the mean objective and violation. Does
        nothing when no finished trial has the objective."""
        with self._lock:
            processes.raise_if_stopped()
            finished = [trial for trial in self.trials if trial.state == FINISHED]
            if finished and all(trial.unmeasured for trial in finished):
                return
            suggestion, values = search.next()
            known = {trial.name: trial for trial in self.trials}
            chosen = [known.get(trial.name, trial) for trial in self.space.trials(self.name, values)]
            trials.read_params(self.home, self.commit, chosen)
            self.trials += [trial for trial in chosen if trial.name not in known]
        list(places.map(self.run_trial, chosen))
        with self._lock:
            if any(trial.state == FAILED or trial.unmeasured for trial in chosen):
                search.study.tell(suggestion, state=TrialState.FAIL)
                return
            if self.call.constraint:
                suggestion.set_constraint("constraint", fmean(float(trial.violation or 0.0) for trial in chosen))
            search.study.tell(suggestion, fmean(float(trial.objective or 0.0) for trial in chosen))

    def run_trial(self, trial: Trial) -> None:
        """Run the trial, unless its experiment is there, and write the tables; a failure is recorded in it. Raises
        processes.Stopped."""
        with trial.lock:
            processes.raise_if_stopped()
            if trial.state != WAITING:
                return
            try:
                if not self._read(trial):
                    trial.state = RUNNING
                    self._start(trial)
                    self._read(trial)
                    took = "" if trial.seconds is None else f" in {duration(trial.seconds)}"
                    self._print(trial, f"finished{took}")
            except processes.Stopped:
                raise
            except Exception as error:  # also Prefect's and the operating system's: the other trials go on
                address = os.environ.get("PREFECT_API_URL")
                if address and not server.answers_soon(address):  # all others would fail, too
                    trial.state = WAITING
                    raise UserError(
                        f"the Prefect server at {without_credentials(address)} does not answer; the same command "
                        f"continues ({error})"
                    ) from error
                text = " ".join(str(error).split())
                known = isinstance(error, UserError | TrialFailed)
                trial.state, trial.message = FAILED, text if known else f"{type(error).__name__}: {text}"
                self._print(trial, f"FAILED: {trial.message}")
        self.write()

    def _start(self, trial: Trial) -> None:
        """Run the trial to its end, in the pool or here. Raises UserError or TrialFailed where it fails."""
        if self.pool is not None:
            self._print(trial, f"submitted to pool {self.pool.name}")
            show = partial(self._print, trial)
            self.pool.run(trial.name, self.commit, trial.overrides, self.label, self.options, show)
            return
        path = self.folder / "logs" / f"{trial.name}.log"
        self._print(trial, f"starts; progress: {path.relative_to(self.home)}")
        space = Workspace(self.home, trial.name, self.commit, trial.overrides)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", buffering=1) as log, workspace.opened(space):

            def receive(line: str) -> None:
                log.write(f"{line}\n")
                if isolated.STAGE_ENDED.match(line):
                    self._print(trial, line)

            variables, trailers = {STUDY_VARIABLE: self.label}, {isolated.STUDY: self.name}
            result = isolated.run(space, receive, self.options, variables, trailers)
        if result.code:
            raise UserError(f"{result.error} (kept in {space.root}, log {path})")

    def _read(self, trial: Trial) -> bool:
        """Whether the trial's experiment is there; then it has its results. Raises UserError for one of this name with
        other parameters."""
        found = isolated.find(self.home, self.commit, trial.name)
        if found is None:
            return False
        trial.seconds = isolated.seconds_of(self.home, found)
        try:
            files = read_results(self.home, found, str(PARAMS_FILE), "metrics", "plots/frontier.csv")
        except UserError as error:
            raise UserError(f"{error}, or `dvc exp remove {trial.name}` to run it again") from None
        if parse_yaml(files[str(PARAMS_FILE)].decode("utf-8"), PARAMS_FILE) != trial.params:
            raise UserError(
                f"experiment {trial.name} is there, with other parameters; choose another --name, or "
                f"`dvc exp remove {trial.name}`"
            )
        trial.metrics = {Path(path).stem: json.loads(files[path]) for path in files if path.startswith("metrics/")}
        if frontier := files.get("plots/frontier.csv"):
            rows: list[dict[Any, Any]] = pd.read_csv(io.BytesIO(frontier)).to_dict("records")
            trial.frontier = [row for row in rows if pd.notna(row["kl"])]
        trial.state = FINISHED
        expressions.measure(self.call, trial)
        return True

    def _print(self, trial: Trial, line: str) -> None:
        with self._lock:
            print(f"{trial.name}  {line}", flush=True)

    def write(self) -> str:
        """Write tables and picture of what is there now; returns the tables."""
        with self._lock:
            text = tables.report(self.call, self.trials)
            with atomic(self.folder / TABLE) as place:
                place.write_text(text + "\n", encoding="utf-8")
            groups = tables.by_setting(self.trials)
            if len(groups) > MOST_DRAWN and self.call.aim:
                best = list(tables.ranked(self.call, groups))[:MOST_DRAWN]
                groups = {name: group for name, group in groups.items() if name in best}
            if drawn := picture.draw(groups):
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
    with_leaderboard: bool = False,
) -> int:
    """Run the study's trials, or those that are missing; returns the exit code: 1 when a trial failed. `options` are
    those of `leash run`; `jobs` trials run side by side (None: one here, `POOL_JOBS` on the workers of `pool`).
    `with_leaderboard`: rows for a leaderboard are printed, too.

    Raises UserError before anything runs: for a wrong override, name, method or expression, another study of this
    name, a work pool that cannot be used, or a study that cannot be on the leaderboard.
    """
    made = prepare(home, call, name, revision)
    if with_leaderboard:
        leaderboard.require_the_demo(made.trials)
    made.options, made.jobs = tuple(options), jobs or (POOL_JOBS if pool else 1)
    path = made.folder / "study.lock"
    seconds = driver.patience(path, processes.RUNNERS_STOPPING_SECONDS)
    with held(path, seconds, f"runs study {made.name}") as file, processes.keeping(file.descriptor):
        if pool:
            made.pool = connect(home, pool, made.commit)
        elif server.configured_url(home) is None:  # one for all trials, which inherit it; it ends with this process
            server.wait_for_temporary(server.start_temporary(home))
        else:
            server.require(home)
        try:
            with suppress(OSError, UserError):
                record_study(home, made.label)
            made.run()
            text = made.write()
        finally:
            states = [trial.state for trial in made.trials]
            counts = {f"trials_{state}": float(states.count(state)) for state in (FINISHED, FAILED)}
            broken = isinstance(sys.exc_info()[1], Exception) or not states or FAILED in states
            stopped = WAITING in states or RUNNING in states
            status: Status = "KILLED" if stopped else "FAILED" if broken else "FINISHED"
            with suppress(OSError, UserError):
                record_study(home, made.label, status, counts, [made.folder / TABLE, made.folder / PICTURE])
    print(f"\n{text}\n\ntables and picture: {made.folder}", flush=True)
    print("`dvc exp show` lists the experiments; `dvc exp apply NAME` brings one's results into this folder")
    if with_leaderboard and FAILED not in states:
        command = json.loads((made.folder / CALL).read_text(encoding="utf-8"))["command"]
        print(f"\n{leaderboard.rows(made.trials, made.commit, command)}", flush=True)
    return 1 if FAILED in states else 0


def prepare(home: Path, call: Call, name: str | None, revision: str) -> Study:
    """`find`, written down with the command that runs it. Raises UserError as `study`."""
    made = find(home, call, name, revision)
    path = made.folder / CALL
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    continues = "continues " if path.is_file() else ""
    with atomic(path) as place:
        record = {"commit": made.commit, "call": asdict(call), "command": command}
        place.write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")
    print(f"study {made.name} {continues}at commit {made.commit[:12]}", flush=True)
    return made


def find(home: Path, call: Call, name: str | None, revision: str) -> Study:
    """A new study, or the one of this name with its commit; writes nothing. Raises UserError as `study`."""
    space = trials.read_space(call.overrides, call.methods, call.cases)
    for expression in filter(None, (call.objective, call.constraint)):
        expressions.check(expression)
    if call.search and not space.varied:
        raise UserError("--search needs a parameter to vary, such as -S 'ppo.kl.coef=interval(0.02,0.5)'")
    commit = workspace.resolve(home, revision)
    name = as_name(name) if name else trials.default_name(space, commit)
    path = home / STUDIES / name / CALL
    wanted = {"commit": commit, "call": json.loads(json.dumps(asdict(call), default=str))}
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else wanted
    if (
        recorded is wanted
        and call.params is None
        and workspace.git(home, "status", "--porcelain", "--", str(PARAMS_FILE))
    ):
        raise UserError(f"{PARAMS_FILE} has edits that are not committed, and a study runs a commit: commit them first")
    free = {} if call.search else dict.fromkeys(("objective", "constraint", "maximise"))  # these may change
    if asdict(Call(())) | recorded["call"] | free != wanted["call"] | free:  # an earlier version has fewer fields
        raise UserError(f"study {name} was begun as `{recorded['command']}`; call it so, or choose another --name")
    if call.params is not None:
        written = workspace.git(home, "show", f"{recorded['commit']}:./{PARAMS_FILE}")
        base = YAML(typ="safe", pure=True).load(written)
        space = replace(space, fixed=(*file.changes(base, call.params), *space.fixed))
    made = Study(home, name, recorded["commit"], call, space)
    made.trials += trials.grid(name, space) if call.search is None else []
    trials.read_params(home, made.commit, made.trials)
    return made
