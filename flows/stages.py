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
from typing import Any

from flows import processes
from rlhf_core.errors import UserError
from rlhf_core.files import remove
from tasks.stage.dvc_files import open_project
from tasks.tracking.settings import OUTCOME_VARIABLE

OnLine = Callable[[str], None]
Environment = Mapping[str, str | None]
"""Variables to change for a stage; None removes one."""

EXECUTED, UP_TO_DATE, RESTORED, FAILED, NOT_RUN = "Completed", "UpToDate", "Restored", "Failed", "NotRun"
"""How a stage ended; the first three are also the names of its Prefect state."""
_TRACEBACK = ("Traceback (", "  ", "KeyboardInterrupt")
"""What Python prints where a signal ends a program that still imports."""


class StageUserError(UserError):
    """A stage refused its input, or DVC found something that the user must fix; another attempt would fail, too."""


class StageCrash(Exception):
    """A stage failed, and may succeed when it is run again."""


@dataclass(frozen=True)
class Outcome:
    """How one stage ended: one of the five states above, its wall-clock seconds, its message, and why it failed."""

    stage: str
    state: str
    seconds: float
    message: str = ""
    attempts: int = 1
    error: StageUserError | StageCrash | None = None


class PipelineFailed(Exception):
    """At least one stage failed: `outcomes` holds how every stage ended, in the graph's order, `errors` why some
    failed."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__(outcomes)
        self.outcomes = outcomes
        self.errors = [one.error for one in outcomes if one.error]

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


def run_stage(
    root: Path,
    stage: str,
    force: bool,
    timeout: float | None,
    on_line: OnLine,
    options: Sequence[str] = (),
    environment: Environment | None = None,
) -> Outcome:
    """`dvc repro --single-item STAGE` at `root`, live; `timeout` in seconds, `options` more words for DVC.

    Raises StageUserError (exit 2 of the stage, or DVC found something that the user must fix), StageCrash (anything
    else, the time-out included), processes.Stopped.
    """
    transcript = _Transcript()

    def receive(line: str) -> None:
        transcript.read(line)
        if not (processes.is_stopping() and line.startswith(_TRACEBACK)):
            on_line(line)

    command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", *options, stage]
    command += ["--force"] if force else []
    folders = [str(Path(sys.executable).parent), *filter(None, [os.environ.get("PATH")])]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="leash-") as folder:
        written = Path(folder) / "outcome.json"
        own = {
            "PATH": os.pathsep.join(folders),  # the stage's `python` is the driver's
            "PYTHONUNBUFFERED": "1",
            "PYTHONIOENCODING": "utf-8:backslashreplace",  # the driver reads UTF-8
            OUTCOME_VARIABLE: str(written),
        }
        changed = {**os.environ, **own, **(environment or {})}
        env = {name: value for name, value in changed.items() if value is not None}
        try:
            status = processes.run(command, cwd=root, env=env, on_line=receive, timeout=timeout)
        except processes.TimedOut as error:
            raise StageCrash(f"{stage}: {error}") from None
        report = read_report(written)
    seconds = time.monotonic() - started
    if status != 0:
        raise _failure(root, stage, status, transcript, report)
    if report is not None or transcript.ran:
        return Outcome(stage, EXECUTED, seconds, str((report or {}).get("message") or ""))
    if transcript.restored:
        _require_intact(root, stage)
        return Outcome(stage, RESTORED, seconds)
    return Outcome(stage, UP_TO_DATE, seconds)


def refresh_sources(root: Path, sources: Sequence[str], on_line: OnLine) -> None:
    """Record the new contents of tracked data files that were edited in place, as `dvc repro` does first.

    Raises StageUserError when one is missing.
    """
    for source in sources:
        try:
            run_stage(root, source, False, None, on_line)
        except (StageUserError, StageCrash) as error:
            raise StageUserError(f"{error}; restore it with `dvc checkout` or `leash import`") from None


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
    if transcript.blockers:  # `'models/sft' is busy, it is being blocked by:`, then `  (PID 7): /…/dvc repro`
        path = error.partition(" is busy")[0].strip("'")
        program = re.compile(r"\((PID \d+)\): (?:\S*/dvc(?:/__main__\.py)?(?= ))?")
        who = "; ".join(program.sub(r"\1, dvc", line) for line in transcript.blockers)
        return StageUserError(
            f"{stage}: another process works on {path} ({who}); wait for its end or stop it, then run again; if it is "
            "dead (a zombie, or its number belongs to another program by now): rm .dvc/tmp/rwlock"
        )
    if "RWLock-file" in error:
        return StageUserError(f"{stage}: DVC cannot read .dvc/tmp/rwlock; remove it and run again")
    message = f"{stage}: {error or f'dvc ended with {status}'}"
    if transcript.ran or report is not None:
        reason = str((report or {}).get("message") or "") or transcript.last
        return StageCrash(message + (f" ({reason})" if reason else ""))
    if not error or "lock" in error or "unexpected error" in error:  # DVC may succeed the next time
        return StageCrash(message)
    return StageUserError(message)
