"""A run of the pipeline in an isolated workspace, recorded as a DVC experiment of the checkout.

The run is `leash run` in a process group of its own, with the code of the workspace's commit.
"""

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows import processes, workspace
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from rlhf_core.locks import held
from tasks.summary import SUMMARY
from tasks.tracking.settings import RUN_VARIABLE

TRACKED = (SUMMARY, "params.yaml")
"""What git has of it; the rest is in DVC's cache."""
RECORD_SECONDS = 600.0
NIGHTLY, STUDY = "Nightly", "Study"
"""Trailers of an experiment's message: the branch of a nightly run, the study of a trial."""
RETRIES = {"PREFECT_CLIENT_MAX_RETRIES": "5"}
"""Runs side by side write into one database of Prefect; while another one has locked it, the server answers 503."""
STAGE_ENDED = re.compile(r"\[\d+/\d+ (?P<stage>\w+)\] (?P<how>ran|restored|FAILED)\b")
"""A line of `leash run` about a stage that has ended."""

OnLine = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """How a run in a workspace ended: the exit code of `leash run`, wall-clock seconds, the stages that were computed,
    and its error."""

    code: int
    seconds: float
    ran: list[str]
    error: str = ""


def run(
    space: Workspace,
    on_line: OnLine,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    trailers: Mapping[str, str] | None = None,
) -> Result:
    """`leash run OPTIONS` in the workspace, which must be open. When it ends well it is recorded as the DVC experiment
    and MLflow run `space.name`, `trailers` in its message, and the workspace is removed; else the workspace stays.

    Raises processes.Stopped when this process stops it, UserError when the experiment cannot be saved.
    """
    errors: list[str] = []
    ran: list[str] = []

    def receive(line: str) -> None:
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: "))
        if (ended := STAGE_ENDED.match(line)) and ended["how"] == "ran":
            ran.append(ended["stage"])
        on_line(line)

    command = [sys.executable, "-m", "flows.cli", "run", *options]
    env = workspace.process_environment(space.root, **RETRIES, **{RUN_VARIABLE: space.name}, **(variables or {}))
    start = time.monotonic()
    code = processes.run(command, cwd=space.root, env=env, on_line=receive, signals=processes.RUNNER_SIGNALS)
    seconds, error = time.monotonic() - start, "; ".join(errors) or f"leash run ended with {code}"
    if code:
        workspace.write_note(space, why_kept=error)
        return Result(code, seconds, ran, error)
    try:
        _record(space, {"MLflow run": space.name, "Seconds": f"{seconds:.1f}", **(trailers or {})})
    except UserError as refused:
        workspace.write_note(space, why_kept=str(refused))
        raise
    workspace.remove(space)
    return Result(0, seconds, ran)


def _record(space: Workspace, trailers: Mapping[str, str]) -> None:
    """Save the workspace as a DVC experiment named as it is; it replaces an older one. Raises UserError."""
    lines = [f"{name}: {value}" for name, value in trailers.items()]
    message = "\n".join([f"{space.name}: {' '.join(space.overrides) or 'no parameter changed'}", "", *lines])
    present = [name for name in TRACKED if (space.root / name).exists()]  # also what git does not track yet
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "exp", "save", "--force", "--name", space.name,
               "--message", message, *(word for name in present for word in ("--include-untracked", name))]  # fmt: skip
    env = workspace.process_environment(space.root)
    try:
        workspace.git(space.home, "config", "user.email")
    except UserError:  # git has no author here
        who = {"NAME": "leash", "EMAIL": "leash@localhost"}
        env |= {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()}
    printed: list[str] = []
    # DVC's refs of an experiment in the making are shared by all worktrees.
    with held(space.home / "work" / "experiments.lock", RECORD_SECONDS, "saves an experiment"):
        code = processes.run(command, cwd=space.root, env=env, on_line=printed.append)
    if code or find(space.home, space.commit, space.name) is None:
        reason = next((line for line in reversed(printed) if line.strip()), "it printed nothing")
        raise UserError(f"{space.name}: `dvc exp save` failed ({reason}); its results are kept in {space.root}")


def find(home: Path, commit: str, name: str) -> str | None:
    """The commit of a DVC experiment of this baseline; None where there is none."""
    return workspace.git(home, "for-each-ref", "--format=%(objectname)", _ref(commit, name)).strip() or None


def baseline(home: Path, name: str) -> str:
    """The commit from which the newest experiment of this name was made. Raises UserError where there is none."""
    words = ("--sort=-committerdate", "--format=%(refname)", f"refs/exps/*/*/{name}")
    found = workspace.git(home, "for-each-ref", *words).split()
    if not found:
        raise UserError(f"no experiment {name}; `dvc exp show` lists those that there are")
    return "".join(found[0].split("/")[2:4])


def fetch(home: Path, remote: str, commit: str, name: str) -> str | None:
    """As `find`, after a look at the git remote. Raises UserError when the remote does not answer."""
    ref = _ref(commit, name)
    if find(home, commit, name) is None and workspace.git(home, "ls-remote", "--quiet", remote, ref).strip():
        workspace.git(home, "fetch", "--quiet", remote, f"{ref}:{ref}")
    return find(home, commit, name)


def send(home: Path, remote: str, commit: str, name: str) -> None:
    """Send an experiment to the git remote. Raises UserError."""
    ref = _ref(commit, name)
    workspace.git(home, "push", "--quiet", "--force", remote, f"{ref}:{ref}")


def _ref(commit: str, name: str) -> str:
    """DVC's git reference of an experiment."""
    return f"refs/exps/{commit[:2]}/{commit[2:]}/{name}"


def seconds_of(home: Path, experiment: str) -> float | None:
    """The seconds that the run of an experiment took."""
    seconds = trailer(home, experiment, "Seconds")
    return float(seconds) if seconds else None


def trailer(home: Path, experiment: str, name: str) -> str | None:
    """`trailer_of` the message of an experiment."""
    return trailer_of(workspace.git(home, "log", "-1", "--format=%B", experiment), name)


def trailer_of(message: str, name: str) -> str | None:
    """The value of a line `NAME: VALUE` below the first line; None where there is none."""
    line = re.search(rf"\n{re.escape(name)}: (.+)$", message, re.MULTILINE)
    return line[1] if line else None


def as_name(text: str) -> str:
    """The text as a name that git, DVC and MLflow take: letters, digits, `_ . = -`. Raises UserError for one without
    any."""
    name = re.sub(r"[^\w.=-]+", "-", text).strip(".-").replace("..", ".")
    if not name or name.endswith(".lock"):
        raise UserError(f"{text!r} cannot be a name; use letters, digits, _ and -")
    return name
