"""Reads the stage executions recorded in `dvc.lock`, and the results of a commit."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_core.errors import UserError
from tasks.stage.definition import git, is_code
from tasks.stage.dvc_files import LOCK_FILE, Stored, cache_folder, read_lock_file


@dataclass(frozen=True)
class Record:
    """One execution of a stage: paths with their DVC hashes."""

    stage: str
    command: str
    params: Mapping[str, Any]
    inputs: Mapping[str, str]
    """Data and models."""
    code: Mapping[str, str]
    outs: Mapping[str, str]
    """Empty in a model's provenance, which is written before DVC has hashed the model."""
    source: str
    """The file that the record is from."""
    versions: Mapping[str, str] = field(default_factory=dict)
    exemptions: tuple[str, ...] = ()


def recorded(root: Path) -> dict[str, Record]:
    """The records of `dvc.lock` by stage. Raises UserError if the file is missing or cannot be read."""
    text = read_lock_file(root)
    if text is None:
        raise UserError(f"{LOCK_FILE}: file not found; `dvc repro` runs the pipeline and writes it")
    return parse(text, LOCK_FILE)


def parse(text: str, source: str) -> dict[str, Record]:
    """The records in the text of a `dvc.lock`. Raises UserError if it cannot be read."""
    found = {}
    try:
        for name, entry in ((YAML(typ="safe", pure=True).load(text) or {}).get("stages") or {}).items():
            deps, outs = (
                {one["path"]: str(one.get("md5", "")) for one in entry.get(kind) or []} for kind in ("deps", "outs")
            )
            params = {key: value for of in (entry.get("params") or {}).values() for key, value in of.items()}
            inputs = {path: value for path, value in deps.items() if not is_code(path)}
            code = {path: value for path, value in deps.items() if is_code(path)}
            found[name] = Record(name, str(entry.get("cmd", "")), params, inputs, code, outs, source)
    except (YAMLError, AttributeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{source}: cannot be read ({reason}); git has the one before") from None
    return found


def made_by(records: Mapping[str, Record], path: str, digest: str) -> Record | None:
    """The execution whose output at `path` has this hash."""
    return next((record for record in records.values() if record.outs.get(path) == digest), None)


def params_behind(records: Mapping[str, Record], stage: str) -> dict[str, Any] | None:
    """The parameters of a stage and of all stages before it; None if an input has been made again since."""
    outs = {path for record in records.values() for path in record.outs}
    found: dict[str, Any] = {}
    waiting, done = [records[stage]], set[str]()
    while waiting:
        record = waiting.pop()
        found |= record.params
        done.add(record.stage)
        makers = [made_by(records, path, digest) for path, digest in record.inputs.items() if path in outs]
        if None in makers:
            return None
        waiting += [maker for maker in makers if maker is not None and maker.stage not in done]
    return found


def outs_of(root: Path, commit: str) -> dict[str, str]:
    """DVC's hash of each output, as the `dvc.lock` of a commit has it; empty where it has none. Raises UserError if it
    cannot be read."""
    text = git(root, "show", f"{commit}:./{LOCK_FILE}") or ""
    records = parse(text, f"{LOCK_FILE} of {commit[:8]}").values()
    return {path: digest for record in records for path, digest in record.outs.items()}


def read_results(root: Path, commit: str, *paths: str) -> dict[str, bytes]:
    """The files that a commit has at these paths or below them: those in git, and the outputs that its `dvc.lock`
    names, from DVC's cache or default remote. Raises UserError where neither has one."""
    names = (git(root, "ls-tree", "-r", "--name-only", "-z", commit, "--", *paths) or "").split("\0")
    files = {}
    for name in (name for name in names if name and not name.endswith(".gitignore")):
        command = ["git", "show", f"{commit}:./{name}"]
        files[name] = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    folder = cache_folder(root)
    wanted = {
        path: folder / digest[:2] / digest[2:]
        for path, digest in outs_of(root, commit).items()
        if path not in files and any(f"{path}/".startswith(f"{one}/") for one in paths)
    }
    reason = ""
    if lacking := [blob for blob in wanted.values() if not blob.is_file()]:
        from tasks.stage.dvc_adapter import fetch_objects  # a second

        reason = fetch_objects(root, lacking)
    for path, blob in wanted.items():
        if not blob.is_file():
            raise UserError(
                f"{path} of {commit[:8]}: neither DVC's cache nor its default remote has it{reason}; `dvc push` where "
                "it was made"
            )
        files[path] = Stored(blob).read()
    return files
