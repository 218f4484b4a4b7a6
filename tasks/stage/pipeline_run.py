"""Records pipeline runs for MLflow, from params.yaml, dvc.yaml, dvc.lock and the outputs of the stages."""

import hashlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE, is_switched_off, parse, parse_yaml, read_yaml, with_derived
from tasks.params.runtime import RuntimeParams
from tasks.stage.definition import Definition, digest, edited_files, git, git_state, is_code
from tasks.tracking import record
from tasks.tracking.settings import (
    RUN_VARIABLE,
    STUDY_VARIABLE,
    has_driver,
    is_held_back,
    tracking_uri,
    uri_mark,
    without_credentials,
    workspace_id,
)
from tasks.tracking.sync import SECONDS_AT_THE_END, SYNC_SECONDS, Sidecar, sync

UNTRACKED = ("runtime", "promote")
"""Blocks of params.yaml that change no result."""
WITHOUT_RUN = ("check", "check_data")
"""Stages that are not shown."""
WAIT_AT_THE_END_SECONDS = 30.0


def identity(root: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The pipeline run of a project's raw data, closed rounds, parameters and commands: its `key`, and what MLflow
    shows of it."""
    kept = {name: value for name, value in content.items() if name not in UNTRACKED and value != {}}
    commands = {name: stage["cmd"] for name, stage in _yaml(root / "dvc.yaml").get("stages", {}).items()}
    data, rounds = _data(root), len(list((root / "rounds").glob("*.dvc")))
    commit, dirty = git_state(root)
    tags = {"leash.data": data[:16], "leash.dirty": str(dirty).lower(), "mlflow.source.name": "leash"}
    tags |= {"mlflow.user": os.environ["USER"]} if "USER" in os.environ else {}
    tags |= {"leash.round": str(rounds + 1)} if rounds else {}
    if commit:
        tags |= {"leash.commit": commit, "mlflow.source.git.commit": commit}
        for name, words in {"branch": ("branch", "--show-current"), "repoURL": ("remote", "get-url", "origin")}.items():
            if text := git(root, *words):
                tags[f"mlflow.source.git.{name}"] = without_credentials(text)
    if changes := _changes(root, kept):
        tags["leash.changes"] = ", ".join(changes)
    run = os.environ.get(RUN_VARIABLE)
    if run:
        tags["leash.experiment"] = run
    else:  # an isolated run's folders will be removed
        tags |= {
            "leash.report": str(root.resolve() / "report/index.html"),
            "leash.models": str(root.resolve() / "models"),
        }
    return {
        "key": digest({"data": data, "params": kept, "commands": commands}),
        "workspace": workspace_id(root),
        "root": str(root.resolve()),
        "params": record.flatten(kept),
        "tags": tags,
        "experiment": run,
        "study": os.environ.get(STUDY_VARIABLE),
        "round": rounds + 1,
        "edited": [name for name in edited_files(root) if name != str(PARAMS_FILE)],
    }


class Tracking:
    """The record of a running stage, and the process that shows it in MLflow meanwhile."""

    def __init__(self, root: Path, folder: Path, facts: Mapping[str, Any]) -> None:
        self.live = record.Live(root, folder, facts)
        self._root = root
        self._waits = facts["stage"] == "report" and not has_driver()
        at_the_end = WAIT_AT_THE_END_SECONDS if self._waits else SECONDS_AT_THE_END
        self._sidecar = None if is_held_back() else Sidecar(root, folder, self.live.folder.name, at_the_end)

    @classmethod
    def begin(
        cls, definition: Definition, content: dict[str, Any], key: str, hashes: Mapping[str, str]
    ) -> "Tracking | None":
        """Record the begin of a stage; None, with a line, where that is not possible."""
        root, inputs = definition.project.root, {path: text for path, text in hashes.items() if not is_code(path)}
        params = record.flatten(definition.tracked(content))
        facts = {"stage": definition.name, "key": key, "params": params, "inputs": inputs}
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
        if self._sidecar:
            self._sidecar.stage_ended(WAIT_AT_THE_END_SECONDS if self._waits else 0.0)
        uri = tracking_uri(self._root)
        if self._sidecar and self._waits and status == "FINISHED" and record.pending(self._root, uri_mark(uri)):
            where = without_credentials(uri)
            print(f"tracking: not all is in MLflow at {where}; `leash sync` sends it", file=sys.stderr, flush=True)


def collect(root: Path) -> Path | None:
    """Record the stages of `dvc.lock` that DVC restored: those with the present parameters and outputs that this
    workspace has not executed. A new record is made only where that is the whole pipeline. Returns the record; None
    where there is none, params.yaml cannot be read, or `runtime.tracking` is off."""
    try:
        content = read_yaml(root / PARAMS_FILE)
        if not parse(RuntimeParams, content.get("runtime") or {}, "runtime").tracking:
            return None
    except UserError:
        return None
    known, stages = with_derived(content), _yaml(root / "dvc.lock").get("stages", {})
    run = identity(root, content)
    folder = record.folder_of(root) / record.name_of(run)
    names = [
        n
        for n in _yaml(root / "dvc.yaml").get("stages", {})
        if n not in WITHOUT_RUN and not is_switched_off(content, n)
    ]
    whole = stages.keys() >= set(names)
    found: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {}
    for name, entry in stages.items():
        if name in WITHOUT_RUN or is_switched_off(content, name):
            continue
        used = {key: value for values in (entry.get("params") or {}).values() for key, value in values.items()}
        outs = {out["path"]: out.get("md5", "") for out in entry.get("outs", [])}
        shown = [path for path in record.shown_files(name) if path in outs]
        if not shown:
            continue
        if any(_lookup(known, key) != value for key, value in used.items()) or not all(
            _is_current(root / path, outs[path]) for path in shown):  # fmt: skip
            whole = False
            continue
        deps = {dep["path"]: dep.get("md5", "") for dep in entry.get("deps", [])}
        key = digest({"cmd": entry["cmd"], "params": used, "deps": deps})
        found[name] = key, used, {path: value for path, value in deps.items() if not is_code(path)}
    if not (folder / record.RUN).exists():
        if not found or not whole:
            return None
        record.open_record(root, run)
    for name, (key, used, inputs) in found.items():
        execution = folder / f"{name}-{key[:12]}"
        if not (execution / record.FACTS).exists():
            record.copy_files(root, execution, name)
            now = record.now_ms()
            facts = {"stage": name, "key": key, "params": record.flatten(used), "inputs": inputs, "restored": True}
            record.write(execution / record.FACTS, {**facts, "status": "FINISHED", "started": now, "ended": now})
    return folder


def finish(root: Path, seconds: float | None = SYNC_SECONDS) -> str:
    """Record what DVC restored, and make MLflow agree with all records within so many seconds (None: without a limit).
    Returns a line about what is missing there; empty where nothing is."""
    try:
        collect(root)
        return sync(root, seconds)
    except Exception as error:  # whatever it is, the run is worth more
        return f"tracking: not recorded ({error})"


def _is_current(path: Path, md5: str) -> bool:
    """Whether an output is that of dvc.lock; a folder only has to be there."""
    if not path.is_file():
        return path.is_dir() and md5.endswith(".dir")
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() == md5


def _data(root: Path) -> str:
    """A hash of what was imported and of the closed rounds: their `.dvc` files hold the hashes of the contents; of
    other raw files, name, size and time."""
    found = [(path.relative_to(root).as_posix(), [out.get("md5") for out in _yaml(path).get("outs", [])])
             for folder in ("data", "rounds") for path in sorted((root / folder).rglob("*.dvc"))]  # fmt: skip
    if not (root / "data/raw.dvc").exists():
        files = sorted(path for path in (root / "data/raw").rglob("*") if path.is_file() and path.stem != "README")
        others = [path for path in files if path.suffix != ".dvc" and not path.with_name(f"{path.name}.dvc").exists()]
        found += [(path.relative_to(root).as_posix(), [str(path.stat().st_size), str(path.stat().st_mtime_ns)])
                  for path in others if path.name != ".gitignore"]  # fmt: skip
    return digest(found)


def _changes(root: Path, params: dict[str, Any]) -> list[str]:
    """Parameters with another value than in the current commit, as `name=value (value there)`."""
    text = git(root, "show", f"HEAD:./{PARAMS_FILE}")
    if text is None:
        return []
    with suppress(UserError):
        kept = {name: value for name, value in parse_yaml(text, PARAMS_FILE).items() if name not in UNTRACKED}
        before, now = record.flatten({k: v for k, v in kept.items() if v != {}}), record.flatten(params)
        names = [name for name in dict.fromkeys((*now, *before)) if now.get(name) != before.get(name)]
        return [f"{name}={now.get(name, 'none')} ({before.get(name, 'none')})" for name in names]
    return []


def _lookup(content: Any, name: str) -> Any:
    for part in name.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _yaml(path: Path) -> dict[str, Any]:
    """A file that DVC has written, or dvc.yaml; empty where it is missing."""
    try:
        content: dict[str, Any] = YAML(typ="safe").load(path.read_text(encoding="utf-8")) or {}
    except OSError:
        return {}
    return content
