"""Reads the stage executions recorded in `dvc.lock`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_core.errors import UserError
from tasks.stage.definition import is_code
from tasks.stage.dvc_files import LOCK_FILE, read_lock_file


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
    try:
        content = YAML(typ="safe", pure=True).load(text) or {}
        return {name: _record(name, entry, source) for name, entry in (content.get("stages") or {}).items()}
    except (YAMLError, AttributeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{source}: cannot be read ({reason}); git has the one before") from None


def _record(name: str, entry: Mapping[str, Any], source: str) -> Record:
    deps, outs = _hashes(entry.get("deps")), _hashes(entry.get("outs"))
    params: dict[str, Any] = {}
    for values in (entry.get("params") or {}).values():
        params |= values
    return Record(
        stage=name,
        command=str(entry.get("cmd", "")),
        params=params,
        inputs={path: value for path, value in deps.items() if not is_code(path)},
        code={path: value for path, value in deps.items() if is_code(path)},
        outs=outs,
        source=source,
    )


def _hashes(entries: Any) -> dict[str, str]:
    return {entry["path"]: str(entry.get("md5", "")) for entry in entries or []}


def sizes(root: Path) -> dict[str, int]:
    """Path → bytes of every file and folder that `dvc.lock` names."""
    content = YAML(typ="safe", pure=True).load(read_lock_file(root) or "stages: {}")
    entries = [
        item for entry in content["stages"].values() for kind in ("deps", "outs") for item in entry.get(kind, [])
    ]
    return {item["path"]: int(item.get("size", 0)) for item in entries}


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
