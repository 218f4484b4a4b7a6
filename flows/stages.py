"""Runs one stage through `dvc repro`, and reads from its output and its outcome file how it ended."""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flows import processes
from flows.environment import stage_environment
from rlhf_core.errors import UserError
from rlhf_core.files import remove
from tasks.stage.dvc_files import open_project

OnLine = Callable[[str], None]
Environment = Mapping[str, str | None]
"""Variables to change for a stage; None removes one."""
UNCHANGED: Environment = MappingProxyType({})

EXECUTED, UP_TO_DATE, RESTORED, FAILED, NOT_RUN = "Completed", "UpToDate", "Restored", "Failed", "NotRun"
"""How a stage ended; the first three are also the names of its Prefect state."""


class StageUserError(UserError):
    """A stage refused its input, or DVC found something that the user must fix; another attempt would fail, too."""


class StageCrash(Exception):
    """A stage failed, and may succeed when it is run again."""


@dataclass(frozen=True)
class Outcome:
    """How one stage ended: one of the five states above, its wall-clock seconds, and its message."""

    stage: str
    state: str
    seconds: float
    message: str = ""
    why: str = ""
    """Why it was not up to date."""
    attempts: int = 1


class PipelineFailed(Exception):
    """At least one stage failed: `errors` holds why, `outcomes` how every stage ended, both in the graph's order."""

    def __init__(self, errors: list[StageUserError | StageCrash], outcomes: list[Outcome]) -> None:
        super().__init__(errors, outcomes)
        self.errors, self.outcomes = errors, outcomes

    @property
    def is_user_error(self) -> bool:
        """Whether every failure is one that the user can fix."""
        return all(isinstance(error, StageUserError) for error in self.errors)

    def __str__(self) -> str:
        return "; ".join(map(str, self.errors))


@dataclass
class _Transcript:
    """What DVC printed: whether it ran the command or restored the outputs, and its error."""

    ran: bool = False
    restored: bool = False
    error: str = ""
    last: str = ""
    blockers: list[str] = field(default_factory=list)

    def read(self, line: str) -> None:
        self.ran = self.ran or line.startswith("Running stage '")
        self.restored = self.restored or line.endswith("is cached - skipping run, checking out outputs")
        self.restored = self.restored or line.startswith("Pulling data for ")
        if line.startswith("  (PID "):
            self.blockers.append(line.strip())
        if line.startswith("ERROR: "):
            self.error = line.removeprefix("ERROR: ")
        elif line.strip():
            self.last = line.strip()


@dataclass
class _WithoutInterrupts:
    """Hands lines on, without the traceback that Python prints where a signal ends a program that still imports."""

    on_line: OnLine
    held: list[str] = field(default_factory=list)
    """Of a traceback that has not ended."""

    def receive(self, line: str) -> None:
        if not self.held and not line.startswith("Traceback ("):
            self.on_line(line)
            return
        self.held.append(line)
        if len(self.held) > 1 and not line.startswith(" "):
            if line.startswith("KeyboardInterrupt"):
                self.held.clear()
            self.flush()

    def flush(self) -> None:
        """Hand on what is held."""
        for line in self.held:
            self.on_line(line)
        self.held.clear()


def run_stage(
    root: Path,
    stage: str,
    force: bool,
    timeout: float | None,
    on_line: OnLine,
    options: Sequence[str] = (),
    environment: Environment = UNCHANGED,
) -> Outcome:
    """`dvc repro --single-item STAGE` at `root`, live; `timeout` in seconds, `options` more words for DVC.

    Raises StageUserError (exit 2 of the stage, or DVC found something that the user must fix), StageCrash (anything
    else, the time-out included), processes.Stopped.
    """
    arguments = [*(["--force"] if force else []), *options, stage]
    started = time.monotonic()
    try:
        status, transcript, report = _repro(root, arguments, timeout, on_line, environment)
    except processes.TimedOut as error:
        raise StageCrash(f"{stage}: {error}") from None
    seconds = time.monotonic() - started
    if status != 0:
        raise _failure(root, stage, status, transcript, report)
    if report is not None or transcript.ran:
        return Outcome(stage, EXECUTED, seconds, str((report or {}).get("message") or ""))
    if transcript.restored:
        _require_intact(root, stage)
        return Outcome(stage, RESTORED, seconds)
    return Outcome(stage, UP_TO_DATE, seconds)


def _require_intact(root: Path, stage: str) -> None:
    """Raise StageUserError when DVC has restored wrong bytes from a damaged cache, which it does not check. They are
    removed, because DVC would take them for up to date."""
    with open_project(root) as project:
        if not (outs := project.corrupt_outs(stage)):
            return
        objects = " ".join(os.path.relpath(path, root) for path in project.examine_cache(stage).corrupt)
        for out in outs:
            remove(root / out)
    raise StageUserError(
        f"{stage}: DVC's cache is damaged and gave {', '.join(outs)} wrong bytes; `rm -f {objects}`, then "
        f"`dvc fetch {stage}` where there is a remote, and run again: what is missing is computed again"
    )


def refresh_sources(root: Path, sources: tuple[str, ...], on_line: OnLine) -> None:
    """Record the new contents of tracked data files that were edited in place, as `dvc repro` does first.

    Raises StageUserError when one is missing.
    """
    if not sources:
        return
    status, transcript, _ = _repro(root, list(sources), None, on_line)
    if status != 0:
        reason = (transcript.error or transcript.last).replace(f"{root}{os.sep}", "")
        raise StageUserError(f"{reason}; restore it with `dvc checkout` or `leash import`")


def _repro(
    root: Path,
    arguments: list[str],
    timeout: float | None,
    on_line: OnLine,
    environment: Environment = UNCHANGED,
) -> tuple[int, _Transcript, dict[str, Any] | None]:
    transcript, printed = _Transcript(), _WithoutInterrupts(on_line)

    def receive(line: str) -> None:
        transcript.read(line)
        printed.receive(line)

    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", *arguments]
    with tempfile.TemporaryDirectory(prefix="leash-") as folder:
        outcome = Path(folder) / "outcome.json"
        changed = {**stage_environment(outcome), **environment}
        env = {name: value for name, value in changed.items() if value is not None}
        try:
            status = processes.run(command, cwd=root, env=env, on_line=receive, timeout=timeout)
        finally:
            printed.flush()
        return status, transcript, read_report(outcome)


def read_report(path: Path) -> dict[str, Any] | None:
    """The last line that the stage's wrapper wrote; None when DVC did not run the command (or it died before)."""
    try:
        report = json.loads(path.read_text(encoding="utf-8").strip().split("\n")[-1])
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else None


def _failure(
    root: Path, stage: str, status: int, transcript: _Transcript, report: dict[str, Any] | None
) -> StageUserError | StageCrash:
    error = transcript.error.replace(f"{root}{os.sep}", "").removeprefix(f"failed to reproduce '{stage}': ")
    if report is not None and report.get("exit") == 2:
        return StageUserError(f"{stage}: {report.get('message') or error}")
    if "No space left on device" in error:
        return StageUserError(f"{stage}: no space left on the disk; free some (`leash gc` shows which runs take it)")
    if transcript.blockers:
        return StageUserError(f"{stage}: {_busy(error, transcript.blockers)}")
    if "RWLock-file" in error:
        return StageUserError(f"{stage}: DVC cannot read .dvc/tmp/rwlock; remove it and run again")
    if transcript.ran or report is not None:
        reason = str((report or {}).get("message") or "") or transcript.last
        return StageCrash(f"{stage}: {error or f'dvc ended with {status}'}" + (f" ({reason})" if reason else ""))
    if not error or _is_transient(error):
        return StageCrash(f"{stage}: {error or f'dvc ended with {status}'}")
    return StageUserError(f"{stage}: {error}")


def _busy(error: str, blockers: list[str]) -> str:
    """`'models/sft' is busy, it is being blocked by:` and the lines after it, `(PID 7): /…/dvc repro`, as one."""
    path = error.partition(" is busy")[0].strip("'")
    who = "; ".join(re.sub(r"\((PID \d+)\): (?:\S*/dvc(?:/__main__\.py)?(?= ))?", r"\1, dvc", one) for one in blockers)
    return (
        f"another process works on {path} ({who}); wait for its end or stop it, then run again; if it is dead (a "
        "zombie, or its number belongs to another program by now): rm .dvc/tmp/rwlock"
    )


def _is_transient(error: str) -> bool:
    """Whether DVC, which had not started the command, may succeed the next time: a lock, or an internal error."""
    return any(sign in error for sign in ("lock", "unexpected error"))
