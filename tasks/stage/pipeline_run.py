"""Records pipeline runs for MLflow, from params.yaml, dvc.yaml, dvc.lock and the outputs of the stages."""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE, parse, read_yaml, why_switched_off
from tasks.params.runtime import RuntimeParams
from tasks.stage.definition import UNTRACKED, edited_files, git, git_state, is_code
from tasks.stage.dvc_files import Definition, digest, open_project, read_file
from tasks.tracking import record, settings
from tasks.tracking.sync import SECONDS_AT_THE_END, SYNC_SECONDS, start_sidecar, sync

WITHOUT_RUN = ("check", "check_data")
"""Stages that are not shown."""
WAIT_AT_THE_END_SECONDS = 30.0


def identity(root: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The pipeline run of a project's raw data, closed rounds, parameters and commands: its `key`, and what MLflow
    shows of it."""
    kept = {name: value for name, value in content.items() if name not in UNTRACKED and value != {}}
    commands = {name: stage["cmd"] for name, stage in read_file(root / "dvc.yaml").get("stages", {}).items()}
    data, rounds = _data(root), len(list((root / "rounds").glob("*.dvc")))
    commit, dirty = git_state(root)
    tags = {"leash.data": data[:16], "leash.dirty": str(dirty).lower(), "mlflow.source.name": "leash"}
    tags |= {"leash.round": str(rounds + 1)} if rounds else {}
    tags |= {"leash.experiment": os.environ[settings.RUN_VARIABLE]} if settings.RUN_VARIABLE in os.environ else {}
    shown = {
        "leash.commit": commit,
        "mlflow.user": os.environ.get("USER"),
        "mlflow.source.git.commit": commit,
        "mlflow.source.git.branch": git(root, "branch", "--show-current"),
        "mlflow.source.git.repoURL": git(root, "remote", "get-url", "origin"),
    }
    return {
        "key": digest({"data": data, "params": kept, "commands": commands}),
        "workspace": settings.workspace_id(root),
        "root": str(root.resolve()),
        "params": record.flatten(kept),
        "tags": tags | {name: settings.without_credentials(text) for name, text in shown.items() if text},
        "experiment": os.environ.get(settings.RUN_VARIABLE),
        "study": os.environ.get(settings.STUDY_VARIABLE),
        "edited": [name for name in edited_files(root) if name != str(PARAMS_FILE)],
    }


class Tracking:
    """The record of a running stage, and the process that shows it in MLflow meanwhile."""

    def __init__(self, root: Path, folder: Path, facts: Mapping[str, Any]) -> None:
        self.live = record.Live(root, folder, facts)
        self._root = root
        self._waits = facts["stage"] == "report" and settings.OUTCOME_VARIABLE not in os.environ
        at_the_end = WAIT_AT_THE_END_SECONDS if self._waits else SECONDS_AT_THE_END
        held_back = bool(os.environ.get(settings.HOLD_VARIABLE))
        self._sidecar = None if held_back else start_sidecar(root, folder, self.live.folder.name, at_the_end)

    @classmethod
    def begin(
        cls, definition: Definition, content: dict[str, Any], key: str, hashes: Mapping[str, str], resumed: bool
    ) -> "Tracking | None":
        """Record the begin of a stage, and whether it continues the work of an earlier process (`resumed`); None, with
        a line, where that is not possible."""
        root, inputs = definition.project.root, {path: text for path, text in hashes.items() if not is_code(path)}
        params = record.flatten(definition.tracked(content))
        facts: dict[str, Any] = {"stage": definition.name, "key": key, "params": params, "inputs": inputs}
        facts |= {"resumed": True} if resumed else {}
        try:
            folder = record.open_record(root, identity(root, content))
            if definition.name == "report":
                collect(root)
            return cls(root, folder, facts)
        except Exception as error:  # whatever it is, the stage is worth more
            print(f"tracking: not recorded ({error}); the stage goes on", file=sys.stderr, flush=True)
            return None

    def end(self, status: record.Status) -> None:
        """Record the end of the stage. The last stage of a `dvc repro` waits until MLflow has all, at most half a
        minute, and prints a line where it has not."""
        self.live.end(status)
        if self._sidecar is None or self._sidecar.stdin is None:
            return
        with suppress(OSError, subprocess.TimeoutExpired):
            self._sidecar.stdin.write(b".")  # a forked data loader may keep the pipe from ending
            self._sidecar.stdin.close()
            self._sidecar.wait(WAIT_AT_THE_END_SECONDS if self._waits else 0.0)
        uri = settings.tracking_uri(self._root)
        if self._waits and status == "FINISHED" and record.pending(self._root, settings.uri_mark(uri)):
            where = settings.without_credentials(uri)
            text = f"tracking: not all is in MLflow at {where}; `leash run --sync` sends it"
            print(text, file=sys.stderr, flush=True)


def collect(root: Path) -> Path | None:
    """Record the stages of `dvc.lock` that DVC restored: those with the present parameters and outputs that this
    workspace has not executed. A new record is made only where that is the whole pipeline. Returns the record; None
    where there is none, the project cannot be read, or `runtime.tracking` is off."""
    found: dict[str, dict[str, Any]] = {}
    whole = True
    try:
        content = read_yaml(root / PARAMS_FILE)
        if not parse(RuntimeParams, content.get("runtime") or {}, "runtime").tracking:
            return None
        with open_project(root) as project:
            for stage in project.stages:
                if stage.name in WITHOUT_RUN or why_switched_off(content, stage.name):
                    continue
                params = dict(stage.recorded_params)
                shown = [out for out in stage.outs if out.path in record.shown_files(stage.name)]
                if not shown:
                    continue
                current = stage.is_recorded and params == stage.tracked(content)
                if not current or any(not out.exists or out.known_hash() != out.recorded for out in shown):
                    whole = False
                    continue
                deps = {file.path: file.recorded or "" for file in stage.inputs}
                key = digest({"cmd": stage.command, "params": params, "deps": deps})
                inputs = {path: text for path, text in deps.items() if not is_code(path)}
                found[stage.name] = {"key": key, "params": record.flatten(params), "inputs": inputs}
    except UserError:
        return None
    run = identity(root, content)
    folder = record.folder_of(root) / record.name_of(run)
    if not (folder / record.RUN).exists():
        if not found or not whole:
            return None
        record.open_record(root, run)
    for name, facts in found.items():
        execution = folder / f"{name}-{facts['key'][:12]}"
        if not (execution / record.FACTS).exists():
            record.copy_files(root, execution, name)
            now = record.now_ms()
            state = {"stage": name, "restored": True, "status": "FINISHED", "started": now, "ended": now}
            record.write(execution / record.FACTS, facts | state)
    return folder


def finish(root: Path, seconds: float | None = SYNC_SECONDS) -> str:
    """Record what DVC restored, and make MLflow agree with all records within so many seconds (None: without a limit).
    Returns a line about what is missing there; empty where nothing is."""
    try:
        collect(root)
        return sync(root, seconds)
    except Exception as error:  # whatever it is, the run is worth more
        return f"tracking: not recorded ({error})"


def run_url(root: Path) -> str | None:
    """The page of the run of the present parameters; None where MLflow is no server, or does not have it yet, or
    params.yaml cannot be read."""
    try:
        folder = record.folder_of(root) / record.name_of(identity(root, read_yaml(root / PARAMS_FILE)))
    except UserError:
        return None
    return record.read(folder / f"{record.SENT}{settings.uri_mark(settings.tracking_uri(root))}").get("page") or None


def _data(root: Path) -> str:
    """A hash of what was imported and of the closed rounds: their `.dvc` files hold the hashes of the contents; of
    other raw files, name, size and time."""
    found = [(path.relative_to(root).as_posix(), [out.get("md5") for out in read_file(path).get("outs", [])])
             for folder in ("data", "rounds") for path in sorted((root / folder).rglob("*.dvc"))]  # fmt: skip
    if not (root / "data/raw.dvc").exists():
        files = sorted(path for path in (root / "data/raw").rglob("*") if path.is_file() and path.stem != "README")
        others = [path for path in files if path.suffix != ".dvc" and not path.with_name(f"{path.name}.dvc").exists()]
        found += [(path.relative_to(root).as_posix(), [str(path.stat().st_size), str(path.stat().st_mtime_ns)])
                  for path in others if path.name != ".gitignore"]  # fmt: skip
    return digest(found)
