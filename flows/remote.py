"""DVC's default remote: what `leash run --pull` fetches before the stages, and what `--push` sends after them.
Credentials come from the environment and are not printed."""

import os
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from flows import processes
from flows.graph import Graph, Project
from rlhf_core.errors import UserError
from tasks.tracking.settings import without_credentials

OnLine = Callable[[str], None]
PROGRESS_SECONDS = 5.0
"""Between two lines about a transfer."""
_FILES = re.compile(r"(Fetching from|Pushing to) \S+ +(\d+/\d+) \[")
_TOTAL = re.compile(r"^\d+ files? (fetched|pushed)")
LACKING = "failed to fetch data from the cloud"
"""DVC's error where the remote answers, and does not have every file."""
DVC = ("-m", "dvc", "--wait-for-lock")


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


def fetch(project: Project, graph: Graph, wanted: Collection[str], force: bool, on_line: OnLine) -> set[str]:
    """Bring from the remote, into DVC's cache, what the run reads and does not compute, and the tracked data of the
    stages that it computes. Returns the stages whose outputs the run needs in the workspace: those `wanted`, and those
    that a computed stage reads. Raises UserError when the remote fails, or lacks tracked data."""

    def is_lacking(stage: str) -> bool:
        return not all(out.is_cached for out in project.missing(stage))

    computed = {
        stage
        for stage in graph.stages
        if force
        or project.reasons(stage, allow_missing=True)
        or not all(out.in_cache for out in project.missing(stage))
    }
    while True:
        for stage in graph.stages:  # and those below, which may come to other results
            if computed.intersection(graph.upstream[stage]):
                computed.add(stage)
        needed = set(wanted).union(*(graph.upstream[stage] for stage in computed))
        lacking = [stage for stage in graph.stages if stage in needed - computed and is_lacking(stage)]
        if not lacking:
            break
        _run(project.root, [*DVC, "fetch", *lacking], on_line, accepted=LACKING)
        if absent := [stage for stage in lacking if is_lacking(stage)]:
            on_line(f"DVC's remote lacks results of {', '.join(absent)}; they are computed")
            computed.update(absent)
    data = sorted({source for stage in computed for source in graph.sources[stage] if project.missing(source)})
    if data:
        try:
            _run(project.root, [*DVC, "pull", *data], on_line)
        except UserError as error:
            raise UserError(f"{', '.join(data)}: {error}") from None
    return needed


def push(root: Path, names: Sequence[str], on_line: OnLine) -> None:
    """Send the results of these stages and .dvc files, and the run cache. Raises UserError when the remote fails."""
    _run(root, [*DVC, "push", "--run-cache", *names], on_line)
    _run(root, ["-m", "flows.remote", str(root)], on_line)


def _run(root: Path, words: Sequence[str], on_line: OnLine, accepted: str = "") -> None:
    """Run Python with these words; print its progress and how many files it moved. Raises UserError with the first
    error that it prints, unless that has the `accepted` words."""
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

    env = {**os.environ, "DVC_IGNORE_ISATTY": "true"}
    code = processes.run([sys.executable, *words], cwd=root, env=env, on_line=receive)
    reason = errors[0] if errors else f"dvc ended with {code}"
    if code and not (accepted and accepted in reason):
        raise UserError(
            f"DVC's remote {require(root, False, True)}: {without_credentials(reason)}; check its address and the "
            "credentials (`dvc remote list`, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for S3)"
        )


if __name__ == "__main__":  # what `dvc push` leaves out, in a process of its own, which can be stopped
    from tasks.stage.dvc_adapter import push_uncached

    try:
        push_uncached(Path(sys.argv[1]))
    except Exception as error:  # of DVC and of the remote's client
        sys.exit(f"ERROR: {' '.join(str(error).split())}")
