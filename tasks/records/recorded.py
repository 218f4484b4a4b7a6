"""What `dvc.lock` says was made from what, now and in git's history, and which content lies at a path. Reads only;
what a person asks about it stands in `tasks/records/lineage.py` and `flows/commands/verify/verify.py`."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from dvc.exceptions import DvcException
from dvc.repo import Repo
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_core.errors import UserError
from tasks.stage.contents import read
from tasks.stage.definition import is_code

LOCK_FILE = "dvc.lock"
FOLDER = ".dir"
"""What the hash of a folder ends with, in DVC's notation."""


@dataclass(frozen=True)
class Record:
    """One execution of a stage: paths with the hashes that DVC gave them."""

    stage: str
    command: str
    params: Mapping[str, Any]
    inputs: Mapping[str, str]
    """Data and models."""
    code: Mapping[str, str]
    outs: Mapping[str, str]
    """Empty where the record is a model's own, which cannot hold the model's hash."""
    source: str
    """Where this is written, in words."""
    versions: Mapping[str, str] = field(default_factory=dict)
    exemptions: tuple[str, ...] = ()


@contextmanager
def repository(root: Path) -> Iterator[Repo]:
    """The project as DVC reads it. Raises UserError where DVC cannot."""
    try:
        with Repo(str(root)) as repo:
            yield repo
    except DvcException as error:
        reason = " ".join(str(error).split()).replace(f"{root}/", "")
        raise UserError(f"DVC cannot read the project: {reason}") from error


def recorded(root: Path) -> dict[str, Record]:
    """Stage → what `dvc.lock` records of it. Raises UserError where there is none, or it cannot be read."""
    path = root / LOCK_FILE
    if not path.is_file():
        raise UserError(f"{LOCK_FILE}: file not found; `dvc repro` runs the pipeline and writes it")
    return parse(path.read_text(encoding="utf-8", errors="replace"), LOCK_FILE)


@lru_cache(maxsize=32)
def parse(text: str, source: str) -> dict[str, Record]:
    """The entries of a `dvc.lock`. Raises UserError for what is none."""
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
    content = YAML(typ="safe", pure=True).load((root / LOCK_FILE).read_text(encoding="utf-8"))
    entries = [
        item for entry in content["stages"].values() for kind in ("deps", "outs") for item in entry.get(kind, [])
    ]
    return {item["path"]: int(item.get("size", 0)) for item in entries}


def made_by(records: Mapping[str, Record], path: str, digest: str) -> Record | None:
    """The execution whose output at `path` has this hash."""
    return next((record for record in records.values() if record.outs.get(path) == digest), None)


def params_behind(records: Mapping[str, Record], stage: str) -> dict[str, Any] | None:
    """The parameters of a stage and of all that it was made from; None where some of that was made anew since."""
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


def made_once(root: Path, path: str | None, digest: str) -> Record | None:
    """The same in git's history of `dvc.lock`, on every branch; its `source` names the commit. None: it is unknown
    there. Without `path`: whatever output had this hash."""
    for commit in _git(root, "log", "--all", "--format=%h", f"-S{digest}", "--", LOCK_FILE).split():
        text = _git(root, "show", f"{commit}:./{LOCK_FILE}")
        try:
            records = parse(text, f"{LOCK_FILE} of commit {commit}")
        except UserError:
            continue
        for record in records.values():
            if digest in record.outs.values() and path in (None, *_at(record, digest)):
                return record
    return None


def commit_of(root: Path, digest: str) -> str | None:
    """The first commit whose `dvc.lock` has this hash; None where none has."""
    found = _git(root, "log", "--all", "--reverse", "--format=%h", f"-S{digest}", "--", LOCK_FILE).split()
    return found[0] if found else None


def tracked_in(root: Path, commit: str, folder: str) -> dict[str, str]:
    """Path → hash of the data that .dvc files below `folder` tracked in that commit."""
    found: dict[str, str] = {}
    for name in _git(root, "ls-tree", "-r", "--name-only", commit, f"{folder}/").splitlines():
        if name.endswith(".dvc"):
            content = YAML(typ="safe", pure=True).load(_git(root, "show", f"{commit}:./{name}")) or {}
            found |= {str(Path(name).parent / out["path"]): str(out.get("md5", "")) for out in content.get("outs", [])}
    return found


def _at(record: Record, digest: str) -> Iterator[str]:
    return (path for path, value in record.outs.items() if value == digest)


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def hash_at(repo: Repo, path: Path) -> str | None:
    """The hash that DVC gives to what lies at `path` (absolute; a file or folder); None where nothing lies."""
    if not path.exists():
        return None
    return str(_object(repo, path).hash_info.value)


def files_below(repo: Repo, path: Path) -> list[str]:
    """Every file that counts for the hash of the folder at `path`, relative to it; for a file the one text ""."""
    return [""] if path.is_file() else ["/".join(key) for key, _, _ in _object(repo, path)]


def _object(repo: Repo, path: Path) -> Any:
    inside = path.resolve().is_relative_to(Path(repo.root_dir).resolve())
    return read(repo, str(path), repo.dvcignore if inside else None)


def from_cache(repo: Repo, digest: str, name: str) -> bytes | None:
    """A file of a folder that DVC's cache holds; None where it does not."""
    for inside, blob in listing(repo, digest):
        if inside == name:
            return blob.read_bytes() if blob.is_file() else None
    return None


def listing(repo: Repo, digest: str) -> list[tuple[str, Path]]:
    """(path inside, file in DVC's cache) of everything in the folder with this hash; ("", file) for a file's hash. An
    empty list where the cache does not hold the listing."""
    blob = Path(repo.cache.local.oid_to_path(digest))
    if not blob.is_file():
        return []
    if not digest.endswith(FOLDER):
        return [("", blob)]
    try:
        entries = json.loads(blob.read_text(encoding="utf-8"))
    except ValueError:
        return []
    return [(entry["relpath"], Path(repo.cache.local.oid_to_path(entry["md5"]))) for entry in entries]
