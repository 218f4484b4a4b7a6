"""DVC's default remote: fetches what a run needs before its stages begin, and sends what it made at its end. DVC's
commands do both. Credentials come from the environment and are not printed."""

import os
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows import processes
from flows.graph import Graph
from flows.status import Project
from rlhf_core.errors import UserError
from tasks.tracking.settings import without_credentials

OnLine = Callable[[str], None]
PROGRESS_SECONDS = 5.0
"""Between two lines about a transfer."""
_FILES = re.compile(r"(Fetching from|Pushing to) \S+ +(\d+/\d+) \[")
_TOTAL = re.compile(r"^\d+ files? (fetched|pushed)")


@dataclass(frozen=True)
class Fetched:
    """The stages and .dvc files of a run whose results dvc.lock has for the present inputs."""

    ready: frozenset[str]
    """Needed, and in DVC's cache."""
    unneeded: frozenset[str]
    """Neither wanted nor read by a stage that must be computed; not fetched."""
    recorded: frozenset[str]
    """Both, and those of which the remote lacks a file."""


NOTHING_FETCHED = Fetched(frozenset(), frozenset(), frozenset())


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


def fetch(project: Project, graph: Graph, wanted: Collection[str], force: bool, on_line: OnLine) -> Fetched:
    """Fetch the recorded outputs of the `wanted` stages, and the inputs of those stages of `graph` that are computed.

    What the remote lacks is computed, and its inputs are fetched in turn; with `force` all is computed.
    Raises UserError when the remote fails.
    """
    recorded = set[str]()
    for stage in graph.stages:
        if not force and recorded.issuperset(graph.upstream[stage]) and project.is_recorded(stage):
            recorded.add(stage)
    tried = set[str]()
    while True:
        needed, computed = _needed(project, graph, set(wanted), recorded, tried)
        absent = [name for name in needed if name not in computed | tried and not _is_here(project, name)]
        if not absent:
            break
        on_line(f"fetching what is missing of {', '.join(absent)}")
        _run(project.root, ["fetch", *absent], on_line)
        tried.update(absent)
    sources = [name for name in needed if name.endswith(".dvc") and project.missing(name) and _is_here(project, name)]
    if sources:
        _run(project.root, ["checkout", *sources], on_line)
    known = {*graph.stages, *graph.all_sources()} - computed
    return Fetched(frozenset(known.intersection(needed)), frozenset(known.difference(needed)), frozenset(recorded))


def _needed(
    project: Project, graph: Graph, wanted: set[str], recorded: set[str], tried: set[str]
) -> tuple[list[str], set[str]]:
    """The stages and .dvc files whose files a run needs, and the stages that it computes: those without a recorded
    result, and those that are needed and still missing after a fetch."""
    computed = set(graph.stages) - recorded
    wanted = wanted.union(*map(project.makers_of_params, graph.stages))
    while True:
        read = {name for stage in computed for name in (*graph.upstream[stage], *graph.sources[stage])}
        needed = [name for name in (*graph.all_sources(), *graph.stages) if name in wanted | read]
        lost = {name for name in tried.intersection(needed, recorded) if not _is_here(project, name)}
        if lost <= computed:
            return needed, computed
        computed |= lost


def _is_here(project: Project, name: str) -> bool:
    """Whether each of its outputs is here or in DVC's cache."""
    return all(file.is_whole for file in project.missing(name))


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
