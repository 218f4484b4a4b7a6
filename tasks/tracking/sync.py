"""Brings the records in `work/tracking` to MLflow, from processes of their own that may be killed at any time. Does not
import mlflow."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from tasks.tracking import record, settings

SYNC_SECONDS = 60.0
FOLLOW_AFTER_SECONDS = 20.0
"""A stage that runs for longer is followed while it runs; importing mlflow takes longer than many a stage."""
SECONDS_AT_THE_END = 12.0
"""The process beside a stage ends at most this long after it; `leash run --sync` sends what is left."""
CODE = Path(__file__).resolve().parents[2]


def sync(root: Path, seconds: float | None = SYNC_SECONDS) -> str:
    """Make MLflow agree with all records within so many seconds (None: without a limit). Returns a line where something
    is missing; empty where nothing is."""
    uri = settings.tracking_uri(root)
    if os.environ.get(settings.HOLD_VARIABLE) or not record.pending(root, settings.uri_mark(uri)):
        return ""
    reason = settings.unreachable(uri)
    if not reason:
        command = [sys.executable, "-m", "tasks.tracking.exporter", str(root.resolve())]
        try:
            done = subprocess.run(
                command, env=_environment(root), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=seconds, start_new_session=True, check=False,
            )  # fmt: skip
            failure = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            reason = failure if done.returncode else done.stdout.strip()
        except subprocess.TimeoutExpired:
            reason = f"not all was sent in {seconds:.0f} s"
        except OSError as error:
            reason = str(error)
    where = settings.without_credentials(uri)
    reason = settings.without_credentials(reason)
    return f"tracking: not all is in MLflow at {where} ({reason}); `leash run --sync` tries again" if reason else ""


def start_sidecar(
    root: Path, folder: Path, execution: str, at_the_end: float = SECONDS_AT_THE_END
) -> subprocess.Popen[bytes] | None:
    """A process beside a stage that shows its points in MLflow while it runs, and the rest when it has ended, or its
    standard input has. It ends by itself some seconds later; killing it loses nothing. None where it cannot start."""
    limits = [str(FOLLOW_AFTER_SECONDS), str(at_the_end)]
    command = [sys.executable, "-m", "tasks.tracking.sync", str(root.resolve()), str(folder), execution, *limits]
    with suppress(OSError):
        return subprocess.Popen(
            command, env=_environment(root), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True,
        )  # fmt: skip
    return None


def _environment(root: Path) -> dict[str, str]:
    """With this code first; the address may contain a password, and the environment is in no list of processes."""
    path = os.pathsep.join([str(CODE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"MLFLOW_TRACKING_URI": settings.tracking_uri(root), "PYTHONPATH": path}


def record_study(
    root: Path,
    label: str,
    status: str = "RUNNING",
    metrics: Mapping[str, float | None] = MappingProxyType({}),
    files: Sequence[Path] = (),
) -> str:
    """Record the study with this `settings.study_label`, whose run its trials become children of, or its end with these
    metrics and files, and send all that waits; a line where some is left."""
    figures = {name: value for name, value in metrics.items() if value is not None}
    run = {"kind": "study", "study": label, "status": status, "metrics": figures, "root": str(root.resolve())}
    run |= record.this_process()
    folder = record.open_record(root, run)
    for file in filter(Path.is_file, files):
        (folder / record.FILES).mkdir(exist_ok=True)
        shutil.copyfile(file, folder / record.FILES / file.name)
    return sync(root)


def main() -> None:
    """`python -m tasks.tracking.sync ROOT RECORD EXECUTION SECONDS SECONDS` follows a stage, from so many seconds after
    its begin until so many after its end. Under a driver, which sends all in the end, it does nothing for a short
    one."""
    root, folder, execution, after, at_the_end = sys.argv[1:]
    ended = select.select([sys.stdin], [], [], float(after))[0]
    if not (ended and os.environ.get(settings.OUTCOME_VARIABLE)):
        settings.prepare_environment()
        from tasks.tracking.exporter import follow  # imports mlflow: seconds

        follow(Path(root), Path(folder), execution, float(at_the_end))


if __name__ == "__main__":
    main()
