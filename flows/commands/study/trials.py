"""Runs the trials of a study, several side by side, each in an isolated workspace, with a line for each."""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flows import isolated, processes, workspace
from flows.commands.study.results import FAILED, FINISHED, RUNNING, WAITING, Trial, read_metrics, read_tables
from flows.pool import Pool, TrialFailed
from flows.text import shorten
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE, parse_yaml
from tasks.stage.progress import duration
from tasks.tracking.settings import STUDY_VARIABLE

if TYPE_CHECKING:
    from rich.table import Table

LABEL = re.compile(r"^\[(\d+)/(\d+) (\w+)\] (.*)$")
"""A line of `leash run`: place and name of the stage, and what it prints."""
ENDED = re.compile(r"^(ran|restored|FAILED)\b")
LONGEST_PROGRESS = 70


@dataclass(frozen=True)
class Runner:
    """Runs jobs of one study at one commit, here or on the workers of a pool. `variables` are added to the environment
    of each run here."""

    home: Path
    study: str
    commit: str
    logs: Path
    variables: Mapping[str, str]
    options: tuple[str, ...] = ()
    pool: Pool | None = None
    show: Callable[[Trial, str], None] = lambda trial, line: None

    def run(self, trial: Trial) -> Trial:
        """Run the trial, unless its experiment is there; a failure is recorded in it. Raises processes.Stopped."""
        try:
            if self._read(trial):
                return trial
            return self._run(trial)
        except processes.Stopped:
            raise
        except Exception as error:  # also Prefect's and the operating system's: the other trials go on
            text = " ".join(str(error).split())
            return self._failed(trial, text if isinstance(error, UserError) else f"{type(error).__name__}: {text}")

    def _run(self, trial: Trial) -> Trial:
        if self.pool is not None:
            self.show(trial, f"submitted to pool {self.pool.name}")
            return self._run_in(self.pool, trial)
        trial.state, trial.began = RUNNING, time.monotonic()
        self.show(trial, "starts")
        space = Workspace(self.home, trial.name, self.commit, trial.combination.overrides)
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"{trial.name}.log").open("w", encoding="utf-8") as log, workspace.opened(space):
            variables = {**self.variables, STUDY_VARIABLE: self.study}
            receive = partial(self._receive, trial, write=log.write)
            result = isolated.run(space, receive, self.options, variables, {isolated.STUDY: self.study})
        if result.code:
            return self._failed(trial, f"{result.error} (kept in {space.root}, log {self.logs / f'{trial.name}.log'})")
        self._read(trial)
        self.show(trial, f"finished in {duration(result.seconds)}")
        return trial

    def _run_in(self, pool: Pool, trial: Trial) -> Trial:
        def receive(line: str) -> None:
            if line.startswith("running") and trial.state != RUNNING:
                trial.state, trial.began = RUNNING, time.monotonic()
            trial.progress = line
            self.show(trial, line)

        try:
            pool.run(trial.name, self.commit, trial.combination.overrides, self.study, self.options, receive)
        except TrialFailed as error:
            return self._failed(trial, str(error))
        self._read(trial)
        self.show(trial, "finished" if trial.seconds is None else f"finished in {duration(trial.seconds)}")
        return trial

    def _read(self, trial: Trial) -> bool:
        """Whether the trial's experiment is there; then it has its results. Raises UserError for one of this name with
        other parameters."""
        found = isolated.find(self.home, self.commit, trial.name)
        if found is None:
            return False
        files, seconds = isolated.read(self.home, found)
        if parse_yaml(files[str(PARAMS_FILE)].decode("utf-8"), PARAMS_FILE) != trial.params:
            raise UserError(
                f"experiment {trial.name} is there, with other parameters; choose another --name, or "
                f"`dvc exp remove {trial.name}`"
            )
        trial.metrics, trial.tables = read_metrics(files), read_tables(files)
        trial.seconds, trial.state = seconds, FINISHED
        return True

    def _failed(self, trial: Trial, message: str) -> Trial:
        trial.state, trial.message = FAILED, message
        self.show(trial, f"FAILED: {message}")
        return trial

    def _receive(self, trial: Trial, line: str, *, write: Callable[[str], object]) -> None:
        write(f"{line}\n")
        if match := LABEL.match(line):
            place, count, stage, text = match.groups()
            trial.progress = f"{place}/{count} {stage}: {text}"
            if ENDED.match(text):
                self.show(trial, f"[{place}/{count} {stage}] {text}")


def run_all(runner: Runner, jobs: int, ask: Callable[[], Trial | None], ended: Callable[[Trial], object]) -> None:
    """Run what `ask` gives, `jobs` at a time, until it gives None and all have ended; `ended` gets each trial.

    An interrupt stops all of them; they continue with the next call.
    """
    running: set[Future[Trial]] = set()
    with ThreadPoolExecutor(jobs) as pool, processes.session():
        while True:
            while len(running) < jobs and (trial := ask()) is not None:
                running.add(pool.submit(runner.run, trial))
            if not running:
                return
            done, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                ended(future.result())


@contextmanager
def screen(trials: list[Trial]) -> Iterator[Callable[[Trial, str], None]]:
    """Within the block a table with a line for each trial, on a terminal; elsewhere the lines that the yielded function
    gets."""
    lock = threading.Lock()
    if not sys.stdout.isatty():

        def print_line(trial: Trial, line: str) -> None:
            with lock:
                print(f"{trial.name}  {line}", flush=True)

        yield print_line
        return
    from rich.live import Live

    with Live(get_renderable=lambda: table(trials), refresh_per_second=1, vertical_overflow="visible"):
        yield lambda trial, line: None


def table(trials: list[Trial]) -> "Table":
    """A line for each trial: its name, state, time and progress."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("trial", "state", "time", "progress"):
        drawn.add_column(heading, no_wrap=True, overflow="ellipsis")
    for trial in list(trials):
        took = time.monotonic() - trial.began if trial.state == RUNNING else trial.seconds
        text = trial.message if trial.state == FAILED else trial.progress if trial.state in {WAITING, RUNNING} else ""
        cells = (trial.name, trial.state, "" if took is None else duration(took), shorten(text, LONGEST_PROGRESS))
        drawn.add_row(*map(Text, cells))
    return drawn
