"""DVC's default remote: `dvc push` at the end of a run, and `dvc pull` of tracked data that a stage reads. Credentials
come from the environment and are not printed."""

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flows import processes
from rlhf_core.errors import UserError
from tasks.tracking.settings import without_credentials

OnLine = Callable[[str], None]
PROGRESS_SECONDS = 5.0
"""Between two lines about a transfer."""
_FILES = re.compile(r"(Fetching from|Pushing to) \S+ +(\d+/\d+) \[")
_TOTAL = re.compile(r"^\d+ files? (fetched|pushed)")


def require(root: Path, pull: bool, push: bool) -> str:
    """The address of the default remote, without credentials; empty where neither is wanted. Raises UserError where
    there is no default remote, or the folder to pull from is missing."""
    from tasks.stage.dvc_adapter import default_remote

    if not (pull or push):
        return ""
    address = default_remote(root)
    if pull and "://" not in address and not Path(address).is_dir():
        raise UserError(f"DVC's remote {address}: no such folder; mount it, or run without --pull")
    return without_credentials(address)


def pull(root: Path, names: Sequence[str], on_line: OnLine) -> None:
    """Bring the data of these .dvc files. Raises UserError when the remote fails or lacks them."""
    _run(root, ["pull", *names], on_line)


def push(root: Path, names: Sequence[str], on_line: OnLine) -> None:
    """Send the results of these stages and .dvc files, and the run cache. Raises UserError when the remote fails."""
    _run(root, ["push", "--run-cache", *names], on_line)
    _run(root, [], on_line, [sys.executable, "-m", "flows.remote", str(root), *names])


def _run(root: Path, words: list[str], on_line: OnLine, command: Sequence[str] = ()) -> None:
    """Run a DVC command; print its progress and how many files it moved. Raises UserError with DVC's first error."""
    errors: list[str] = []
    printed = time.monotonic()

    def receive(line: str) -> None:
        nonlocal printed
        if line.startswith("ERROR: "):
            errors.append(line.removeprefix("ERROR: ").removeprefix("unexpected error - "))
        elif _TOTAL.match(line):
            on_line(line)
        elif (found := _FILES.search(line)) and time.monotonic() - printed > PROGRESS_SECONDS:
            printed = time.monotonic()
            on_line(f"{'fetching' if found[1].startswith('F') else 'sending'}: {found[2]} files")

    command = command or [sys.executable, "-m", "dvc", "--wait-for-lock", *words]
    code = processes.run(command, cwd=root, env={**os.environ, "DVC_IGNORE_ISATTY": "true"}, on_line=receive)
    if code:
        reason = errors[0] if errors else f"dvc ended with {code}"
        raise UserError(
            f"DVC's remote {require(root, False, True)}: {without_credentials(reason)}; check its address and the "
            "credentials (`dvc remote list`, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for S3)"
        )


def _send_uncached(root: str, *names: str) -> int:
    """What `dvc push` leaves out; a process of its own, which can be stopped."""
    from tasks.stage.dvc_adapter import push_uncached

    try:
        push_uncached(Path(root), names)
    except Exception as error:  # of DVC and of the remote's client
        print(f"ERROR: {' '.join(str(error).split())}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_send_uncached(*sys.argv[1:]))
