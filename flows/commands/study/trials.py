"""Runs the trials of a study, several side by side, each in an isolated workspace, with a line for each."""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows import isolated, processes, workspace
from flows.commands.study.grid import Combination
from flows.pool import Pool, TrialFailed
from flows.text import shorten
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE, parse_yaml
from tasks.stage.progress import duration
from tasks.tracking.settings import STUDY_VARIABLE

if TYPE_CHECKING:
    from rich.table import Table

WAITING, RUNNING, FINISHED, FAILED = "waiting", "running", "finished", "failed"
LABEL = re.compile(r"^\[(\d+)/(\d+) (\w+)\] (.*)$")
"""A line of `leash run`: place and name of the stage, and what it prints."""
ENDED = re.compile(r"^(ran|restored|FAILED)\b")
LONGEST_PROGRESS = 70


@dataclass
class Job:
    """One trial: its overrides, how far it is, and how it ended."""

    trial: Combination
    params: dict[str, Any]
    """All of its parameters."""
    state: str = WAITING
    progress: str = ""
    began: float = 0.0
    seconds: float | None = None
    message: str = ""
    """Why it failed, and where its workspace is."""
    files: dict[str, bytes] = field(default_factory=dict)
    """What its experiment recorded: metrics/*.json, plots/*.csv and params.yaml."""

    @property
    def name(self) -> str:
        """Of the trial, its experiment and its MLflow run."""
        return self.trial.name


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
    show: Callable[[Job, str], None] = lambda job, line: None

    def run(self, job: Job) -> Job:
        """Run the job, unless its experiment is there; a failure is recorded in the job. Raises processes.Stopped."""
        try:
            if self._read(job):
                return job
            return self._run(job)
        except processes.Stopped:
            raise
        except Exception as error:  # also Prefect's and the operating system's: the other trials go on
            text = " ".join(str(error).split())
            return self._failed(job, text if isinstance(error, UserError) else f"{type(error).__name__}: {text}")

    def _run(self, job: Job) -> Job:
        if self.pool is not None:
            self.show(job, f"submitted to pool {self.pool.name}")
            return self._run_in(self.pool, job)
        job.state, job.began = RUNNING, time.monotonic()
        self.show(job, "starts")
        space = Workspace(self.home, job.name, self.commit, job.trial.overrides)
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"{job.name}.log").open("w", encoding="utf-8") as log, workspace.opened(space):
            variables = {**self.variables, STUDY_VARIABLE: self.study}
            receive = partial(self._receive, job, write=log.write)
            result = isolated.run(space, receive, self.options, variables, {isolated.STUDY: self.study})
        if result.code:
            return self._failed(job, f"{result.error} (kept in {space.root}, log {self.logs / f'{job.name}.log'})")
        self._read(job)
        self.show(job, f"finished in {duration(result.seconds)}")
        return job

    def _run_in(self, pool: Pool, job: Job) -> Job:
        def receive(line: str) -> None:
            if line.startswith("running") and job.state != RUNNING:
                job.state, job.began = RUNNING, time.monotonic()
            job.progress = line
            self.show(job, line)

        try:
            pool.run(job.name, self.commit, job.trial.overrides, self.study, self.options, receive)
        except TrialFailed as error:
            return self._failed(job, str(error))
        self._read(job)
        self.show(job, "finished" if job.seconds is None else f"finished in {duration(job.seconds)}")
        return job

    def _read(self, job: Job) -> bool:
        """Whether the job's experiment is there; then it has its results. Raises UserError for one of this name with
        other parameters."""
        found = isolated.find(self.home, self.commit, job.name)
        if found is None:
            return False
        files, seconds = isolated.read(self.home, found)
        if parse_yaml(files[str(PARAMS_FILE)].decode("utf-8"), PARAMS_FILE) != job.params:
            raise UserError(
                f"experiment {job.name} is there, with other parameters; choose another --name, or "
                f"`dvc exp remove {job.name}`"
            )
        job.files, job.seconds, job.state = files, seconds, FINISHED
        return True

    def _failed(self, job: Job, message: str) -> Job:
        job.state, job.message = FAILED, message
        self.show(job, f"FAILED: {message}")
        return job

    def _receive(self, job: Job, line: str, *, write: Callable[[str], object]) -> None:
        write(f"{line}\n")
        if match := LABEL.match(line):
            place, count, stage, text = match.groups()
            job.progress = f"{place}/{count} {stage}: {text}"
            if ENDED.match(text):
                self.show(job, f"[{place}/{count} {stage}] {text}")


def run_all(runner: Runner, jobs: int, ask: Callable[[], Job | None], ended: Callable[[Job], None]) -> None:
    """Run what `ask` gives, `jobs` at a time, until it gives None and all have ended; `ended` gets each job.

    An interrupt stops all of them; they continue with the next call.
    """
    running: set[Future[Job]] = set()
    with ThreadPoolExecutor(jobs) as pool, processes.session():
        while True:
            while len(running) < jobs and (job := ask()) is not None:
                running.add(pool.submit(runner.run, job))
            if not running:
                return
            done, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                ended(future.result())


@contextmanager
def screen(jobs: list[Job]) -> Iterator[Callable[[Job, str], None]]:
    """Within the block a table with a line for each job, on a terminal; elsewhere the lines that the yielded function
    gets."""
    lock = threading.Lock()
    if not sys.stdout.isatty():

        def print_line(job: Job, line: str) -> None:
            with lock:
                print(f"{job.name}  {line}", flush=True)

        yield print_line
        return
    from rich.live import Live

    with Live(get_renderable=lambda: table(jobs), refresh_per_second=1, vertical_overflow="visible"):
        yield lambda job, line: None


def table(jobs: list[Job]) -> "Table":
    """A line for each job: its name, state, time and progress."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("trial", "state", "time", "progress"):
        drawn.add_column(heading, no_wrap=True, overflow="ellipsis")
    for job in list(jobs):
        took = time.monotonic() - job.began if job.state == RUNNING else job.seconds
        text = job.message if job.state == FAILED else job.progress if job.state in {WAITING, RUNNING} else ""
        cells = (job.name, job.state, "" if took is None else duration(took), shorten(text, LONGEST_PROGRESS))
        drawn.add_row(*map(Text, cells))
    return drawn
