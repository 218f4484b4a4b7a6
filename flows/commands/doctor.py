"""What this machine lacks, and what to do about it. Looks only; changes nothing, and starts no server."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement

from flows import rwlock, server
from flows.graph import read_graph
from flows.terminal import table
from rlhf_core.errors import UserError

Verdict = Literal["ok", "note", "BROKEN"]
DISK_GIB = 5.0
"""Free disk below which a run may not end: checkpoints, DVC's cache, MLflow."""


@dataclass(frozen=True)
class Check:
    """One line of the table. `advice` is empty where all is well; only BROKEN makes `leash doctor` fail."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine(root: Path) -> list[Check]:
    """Every check, in the order of the table. A check that itself fails is a finding, never an end."""
    checks: list[Check] = []
    for look in (_python, _versions, _torch, _disk, _git, _dvc, _cache, _locks, _params, _prefect, _mlflow):
        try:
            checks.extend(look(root))
        except Exception as error:  # whatever is broken here is what the user asked about
            checks.append(Check(look.__name__.strip("_"), "BROKEN", f"{type(error).__name__}: {error}", "make setup"))
    return checks


def render(checks: list[Check]) -> str:
    """The table, then what to do about each finding."""
    rows = [(check.name, check.verdict, " ".join(check.found.split())) for check in checks]
    advice = [f"{check.name}: {check.advice}" for check in checks if check.advice]
    return "\n".join([table([("check", "", "found"), *rows]), *(["", *advice] if advice else [])])


def _python(root: Path) -> Iterator[Check]:
    yield Check("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")


def _versions(root: Path) -> Iterator[Check]:
    wanted = list(_requirements(root))
    wrong = [text for requirement in wanted if (text := _mismatch(requirement))]
    if wrong:
        yield Check("packages", "BROKEN", "; ".join(wrong), "pip install -e . -c constraints.txt (or: make setup)")
    elif wanted:
        yield Check("packages", "ok", f"{len(wanted)} requirements met")
    else:
        yield Check("packages", "note", "no constraints.txt, no pyproject.toml", "change into a clone of Leash")


def _requirements(root: Path) -> Iterator[Requirement]:
    """What `pyproject.toml` asks for, and the exact versions of `constraints.txt` for what is installed."""
    project = root / "pyproject.toml"
    if project.is_file():
        content = tomllib.loads(project.read_text(encoding="utf-8"))
        yield from map(Requirement, content.get("project", {}).get("dependencies", []))
    constraints = root / "constraints.txt"
    for line in constraints.read_text(encoding="utf-8").splitlines() if constraints.is_file() else []:
        try:
            requirement = Requirement(line.split("#")[0].strip())
        except InvalidRequirement:
            continue
        if _installed(requirement.name) is not None:
            yield requirement


def _mismatch(requirement: Requirement) -> str:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return ""
    found = _installed(requirement.name)
    if found is not None and requirement.specifier.contains(found, prereleases=True):
        return ""
    return f"{requirement.name} {found or 'missing'} (wanted {requirement.specifier or 'any'})"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch(root: Path) -> Iterator[Check]:
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Check("device", "ok", ", ".join(devices) or "CPU")
    threads, cores = _threads(root), _cores()
    found = f"params.yaml says {threads or '?'}, this machine may use {cores}"
    too_many = threads is not None and threads > cores
    advice = f"set threads: {cores} in params.yaml (it changes the last digits of results)" if too_many else ""
    yield Check("threads", "note" if too_many else "ok", found, advice)


def _cores() -> int:
    """The processors that this process may use, fewer than the machine's in a container or under taskset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads(root: Path) -> int | None:
    from tasks.params.loader import read_yaml

    try:
        threads = read_yaml(root / "params.yaml").get("threads")
    except UserError:
        return None
    return threads if isinstance(threads, int) else None


def _disk(root: Path) -> Iterator[Check]:
    free = shutil.disk_usage(root).free / 2**30
    advice = "" if free >= DISK_GIB else "free some: `dvc gc -w` drops results that nothing refers to"
    yield Check("disk", "note" if advice else "ok", f"{free:.0f} GiB free", advice)


def _git(root: Path) -> Iterator[Check]:
    if shutil.which("git") is None:
        yield Check("git", "BROKEN", "not found", "install git; DVC needs it")
        return
    status = _output(root, "git", "status", "--porcelain")
    if status is None:
        yield Check("git", "BROKEN", "no repository", "git init")
        return
    changed = len(status.splitlines())
    advice = "git commit, so that a result can be traced to its code" if changed else ""
    yield Check("git", "note" if changed else "ok", f"{changed} changed files" if changed else "clean", advice)


def _output(root: Path, *command: str) -> str | None:
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _dvc(root: Path) -> Iterator[Check]:
    if not (root / ".dvc" / "config").is_file():
        yield Check("dvc", "BROKEN", "not initialised", "dvc init")
        return
    try:
        yield Check("dvc", "ok", f"stages {' → '.join(read_graph(root).stages)}")
    except UserError as error:
        text, _, way_out = str(error).partition("; ")
        yield Check("dvc", "BROKEN", text, way_out or "mend that file")


def _cache(root: Path) -> Iterator[Check]:
    """Reads all that `dvc.lock` names, in the workspace and in the cache: minutes where models are large."""
    from tasks.stage.dvc_adapter import open_project

    started = time.monotonic()
    try:
        with open_project(root) as project:
            cached, outs = project.examine_cache(), project.corrupt_outs()
    except UserError:
        return  # the line about DVC says it
    seconds = time.monotonic() - started
    read = f"{cached.objects} objects, {cached.size / 2**20:.1f} MiB, read in {seconds:.1f} s"
    if cached.corrupt:
        objects = " ".join(os.path.relpath(path, root) for path in cached.corrupt)
        advice = f"rm -f {objects}; `dvc fetch` where there is a remote; leash run makes anew what is missing"
        yield Check("cache", "BROKEN", f"{read}; {len(cached.corrupt)} with other bytes than their name says", advice)
    else:
        yield Check("cache", "ok", f"{read}; all as their names say")
    if outs:
        advice = f"rm -rf {' '.join(outs)}; leash run brings them back (edited by hand, or damaged)"
        yield Check("outputs", "note", f"other bytes than dvc.lock names: {', '.join(outs)}", advice)


def _locks(root: Path) -> Iterator[Check]:
    """Only what somebody works on, or what stands in the way; a lock file that nobody holds does neither."""
    try:
        listed = json.loads((root / ".dvc" / "tmp" / "rwlock").read_text(encoding="utf-8"))
        entries = [
            *listed.get("write", {}).values(),
            *(one for many in listed.get("read", {}).values() for one in many),
        ]
        working = {one["pid"]: rwlock.works(one) for one in entries}
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        yield Check("locks", "note", ".dvc/tmp/rwlock is half-written", "rm .dvc/tmp/rwlock (leash run does it)")
        return
    if dead := [str(pid) for pid, works in working.items() if not works]:
        found = f".dvc/tmp/rwlock names dead processes: {', '.join(dead)}"
        yield Check("locks", "note", found, "rm .dvc/tmp/rwlock if dvc repro stumbles over it (leash run does it)")
    elif working:
        yield Check("locks", "note", f"DVC is at work here (PID {', '.join(map(str, working))})")


def _params(root: Path) -> Iterator[Check]:
    from tasks.params.all import Params
    from tasks.params.loader import parse, read_yaml

    try:
        parse(Params, read_yaml(root / "params.yaml"))
    except UserError as error:
        yield Check("params.yaml", "BROKEN", str(error), "see docs/parameters.md and examples/")
    else:
        yield Check("params.yaml", "ok", "valid")


def _prefect(root: Path) -> Iterator[Check]:
    from tasks.tracking.settings import without_credentials

    url = server.configured_url(root)
    shown = without_credentials(url or "")
    if url is None:
        found = "none named: leash run starts one for each run, leash serve needs one"
        yield Check("prefect", "note", found, "leash up")
    elif server.answers(url):
        yield Check("prefect", "ok", shown)
    else:
        yield Check("prefect", "BROKEN", f"no answer at {shown}", "leash up, or correct PREFECT_API_URL")


def _mlflow(root: Path) -> Iterator[Check]:
    from tasks.tracking.settings import without_credentials

    url = os.environ.get("MLFLOW_TRACKING_URI", "")
    shown = without_credentials(url)
    if url.startswith(("http://", "https://")):
        if server.answers(url):
            yield Check("mlflow", "ok", shown)
        else:
            advice = "start it, or unset MLFLOW_TRACKING_URI (runs go on without it, and send later)"
            yield Check("mlflow", "note", f"no answer at {shown}", advice)
        return
    database = root / "mlflow.db"
    yield Check("mlflow", "ok", shown or f"{database}{'' if database.is_file() else ' (the first run makes it)'}")
