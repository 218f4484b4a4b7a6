"""`leash doctor`: checks of the machine and the project, each with what to do. Changes nothing and starts no server."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from flows import server
from flows.graph import read_graph
from flows.text import table
from rlhf_core.errors import UserError
from tasks.stage.definition import WRITTEN, edited_files, git
from tasks.tracking import record, settings
from tasks.tracking.settings import without_credentials

DISK_GIB = 5.0
"""Free disk below which a run may fail: checkpoints, DVC's cache, MLflow."""


@dataclass(frozen=True)
class Check:
    """One line of the table. `advice` is empty where all is well; only BROKEN makes `leash doctor` fail."""

    name: str
    verdict: Literal["ok", "note", "BROKEN"]
    found: str
    advice: str = ""


def examine(root: Path) -> list[Check]:
    """Every check, in the order of the table. A check that raises is itself a finding."""
    checks = [Check("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")]
    for look in (_torch, _gpus, _disk, _git, _dvc, _cache, _locks, _params, _prefect, _mlflow):
        try:
            checks.extend(look(root))
        except Exception as error:  # a broken installation is what this command is for
            checks.append(Check(look.__name__.strip("_"), "BROKEN", f"{type(error).__name__}: {error}", "make setup"))
    return checks


def render(checks: list[Check]) -> str:
    """The table, then what to do about each finding."""
    rows = [(check.name, check.verdict, " ".join(check.found.split())) for check in checks]
    advice = [f"{check.name}: {check.advice}" for check in checks if check.advice]
    return "\n".join([table([("check", "", "found"), *rows]), *(["", *advice] if advice else [])])


def _torch(root: Path) -> Iterator[Check]:
    import torch

    from tasks.params.loader import PARAMS_FILE, read_threads

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Check("device", "ok", ", ".join(devices) or "CPU")
    threads = read_threads(root / PARAMS_FILE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # of this process
    found = f"params.yaml says {threads or '?'}, this machine may use {cores}"
    if threads is not None and threads > cores:
        advice = f"set threads: {cores} in params.yaml (it changes the last digits of results)"
        yield Check("threads", "note", found, advice)
    else:
        yield Check("threads", "ok", found)


def _gpus(root: Path) -> Iterator[Check]:
    """Who uses which GPU, among the stages of this machine."""
    from tasks.stage.gpus import locked_gpus

    try:
        for name, who in locked_gpus():
            yield Check(f"GPU {name}", "note" if who else "ok", who or "free")
    except OSError as error:
        yield Check("GPUs", "note", f"not locked: {error}", "without the locks two stages may use one GPU")


def _disk(root: Path) -> Iterator[Check]:
    free = shutil.disk_usage(root).free / 2**30
    advice = "" if free >= DISK_GIB else "free some: `leash gc` shows which runs take it"
    yield Check("disk", "note" if advice else "ok", f"{free:.0f} GiB free", advice)


def _git(root: Path) -> Iterator[Check]:
    if shutil.which("git") is None:
        yield Check("git", "BROKEN", "not found", "install git; DVC needs it")
        return
    untracked = git(root, "ls-files", "--others", "--exclude-standard", "-z")
    if untracked is None:
        yield Check("git", "BROKEN", "no repository", "git init")
        return
    changed = len(edited_files(root)) + sum(not WRITTEN.fullmatch(name) for name in untracked.split("\0") if name)
    if changed:
        advice = "git commit, so that a result can be traced to its code"
        yield Check("git", "note", f"changed files: {changed}, results of runs not counted", advice)
    else:
        yield Check("git", "ok", "clean, apart from results of runs")


def _dvc(root: Path) -> Iterator[Check]:
    if not (root / ".dvc" / "config").is_file():
        yield Check("dvc", "BROKEN", "not initialised", "dvc init")
        return
    try:
        stages = read_graph(root).stages
        yield Check("dvc", "ok", f"{len(stages)} stages: {', '.join(stages)}")
    except UserError as error:
        text, _, advice = str(error).partition("; ")
        yield Check("dvc", "BROKEN", text, advice or "fix that file")


def _cache(root: Path) -> Iterator[Check]:
    """Reads all that `dvc.lock` names, in the workspace and in the cache: minutes where models are large."""
    from tasks.stage.dvc_files import open_project

    started = time.monotonic()
    try:
        with open_project(root) as project:
            cached, outs = project.examine_cache(), project.corrupt_outs()
    except UserError:
        return  # reported in the line about DVC
    seconds = time.monotonic() - started
    read = f"{cached.objects} objects, {cached.size / 2**20:.1f} MiB, read in {seconds:.1f} s"
    if cached.corrupt:
        objects = " ".join(os.path.relpath(path, root) for path in cached.corrupt)
        advice = f"rm -f {objects}; `dvc fetch` where there is a remote; leash run computes what is missing"
        yield Check("cache", "BROKEN", f"{read}; {len(cached.corrupt)} whose bytes are not those of their name", advice)
    else:
        yield Check("cache", "ok", f"{read}; all intact")
    if outs:
        advice = f"rm -rf {' '.join(outs)}; leash run restores them (edited by hand, or damaged)"
        yield Check("outputs", "note", f"other bytes than dvc.lock names: {', '.join(outs)}", advice)


def _locks(root: Path) -> Iterator[Check]:
    """DVC's list of files in use."""
    path = root / ".dvc" / "tmp" / "rwlock"
    try:
        listed = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        readers = [one for many in listed.get("read", {}).values() for one in many]
        runs = {str(one["pid"]): _runs(one) for one in [*listed.get("write", {}).values(), *readers]}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        yield Check("locks", "note", ".dvc/tmp/rwlock is half-written: DVC stops at it", "rm .dvc/tmp/rwlock")
        return
    if dead := sorted(pid for pid in runs if not runs[pid]):
        found = f".dvc/tmp/rwlock names dead processes: {', '.join(dead)}"
        yield Check("locks", "note", found, "rm .dvc/tmp/rwlock if DVC says that a file is busy")
    elif runs:
        yield Check("locks", "note", f"DVC runs here (process {', '.join(sorted(runs))})")


def _runs(entry: dict[str, Any]) -> bool:
    """Whether the process of an entry still runs: one with its number and its arguments, and no zombie."""
    try:
        process = psutil.Process(int(entry["pid"]))
        arguments = str(entry["cmd"]).partition(" ")[2]
        return process.status() != psutil.STATUS_ZOMBIE and " ".join(process.cmdline()).endswith(arguments)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # of another user
        return True


def _params(root: Path) -> Iterator[Check]:
    from tasks.params.all import Params
    from tasks.params.loader import parse, read_yaml

    try:
        parse(Params, read_yaml(root / "params.yaml"))
        yield Check("params.yaml", "ok", "valid")
    except UserError as error:
        yield Check("params.yaml", "BROKEN", " ".join(str(error).split()), "see docs/parameters.md and examples/")


def _prefect(root: Path) -> Iterator[Check]:
    url = server.configured_url(root)
    if url is None:
        found = "none configured: leash run starts one for each run, leash serve needs one"
        yield Check("prefect", "note", found, "leash up")
    elif server.answers(url):
        yield Check("prefect", "ok", without_credentials(url))
    else:
        found = f"no answer at {without_credentials(url)}"
        yield Check("prefect", "BROKEN", found, "leash up, or correct PREFECT_API_URL")


def _mlflow(root: Path) -> Iterator[Check]:
    url = os.environ.get("MLFLOW_TRACKING_URI", "")
    database, shown = root / "mlflow.db", without_credentials(url)
    if url.startswith(("http://", "https://")) and not server.answers(url):
        advice = "start it, or unset MLFLOW_TRACKING_URI (runs go on without it, and send later)"
        yield Check("mlflow", "note", f"no answer at {shown}", advice)
    else:
        new = "" if database.is_file() else " (created by the first run)"
        yield Check("mlflow", "ok", shown or f"{database}{new}")
    if waiting := len(record.pending(root, settings.uri_mark(settings.tracking_uri(root)))):
        yield Check("mlflow", "note", f"runs that are not all there: {waiting}", "leash run --sync")
