"""Whether files hold the bytes that DVC believes them to hold. DVC reads a file once and then trusts its size, times
and inode, and a file of its cache as long as that is read-only: what a disk or a program spoils behind its back, it
hands on as good. Here everything is read, by DVC's own rules of hashing; nothing is noted in DVC's data base."""

import copy
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dvc.repo import Repo
from dvc_data.hashfile.build import build
from dvc_data.hashfile.state import StateNoop

CHUNK_BYTES = 2**20


def content_hash(output: Any) -> str:
    """The hash of the bytes of a DVC output or dependency, a file or a folder."""
    found = read(output.repo, output.fs_path, output.dvcignore, output.fs, output.hash_name)
    return str(found.hash_info.value)


def read(repo: Repo, path: str, ignore: Any, system: Any = None, kind: str = "md5") -> Any:
    """What DVC makes of a file or folder, its `hash_info` and members; every byte is read."""
    store = copy.copy(repo.cache.local)
    store.state = StateNoop()
    _, _, found = build(store, path, system or repo.fs, kind, ignore=ignore, dry_run=True)
    return found


def address(stage: Any, root: Path) -> str:
    """What `dvc repro` calls a stage when it is started at `root`; DVC's own answer depends on the current folder."""
    path = os.path.relpath(stage.path, root)
    name = getattr(stage, "name", None)
    if name is None:
        return path
    return str(name) if path == "dvc.yaml" else f"{path}:{name}"


def corrupt_outs(repo: Repo, root: Path, stage: str) -> list[str]:
    """The outputs of a stage (`sft`, as `address` has it) that are there, with other bytes than `dvc.lock` names."""
    outs = [out for one in repo.index.stages if address(one, root) == stage for out in one.outs]
    present = [out for out in outs if out.hash_info and out.exists]
    return [relative(Path(out.fs_path), root) for out in present if content_hash(out) != out.hash_info.value]


@dataclass(frozen=True)
class Cached:
    """What DVC's cache has of what `dvc.lock` names: objects, their bytes, and those whose name is not theirs."""

    objects: int
    size: int
    corrupt: list[Path]


def examine_cache(repo: Repo, root: Path, stage: str | None = None) -> Cached:
    """Read every object of the cache that the outputs of `stage` (None: of all stages) need, as far as it is there."""
    size, corrupt = 0, []
    stages = [one for one in repo.index.stages if stage is None or address(one, root) == stage]
    objects = sorted(set(_objects(stages)))
    for path in objects:
        size += path.stat().st_size
        if _md5(path) != path.parent.name + path.name.removesuffix(".dir"):
            corrupt.append(path)
    return Cached(len(objects), size, corrupt)


def _objects(stages: list[Any]) -> Iterator[Path]:
    for out in (out for one in stages for out in one.outs):
        if out.hash_info and out.hash_info.name == "md5":
            yield from _with_members(out.repo, str(out.hash_info.value))


def _with_members(repo: Repo, name: str) -> Iterator[Path]:
    """The object, and those that it lists when it stands for a folder."""
    path = Path(repo.cache.local.oid_to_path(name))
    if not path.is_file():
        return
    yield path
    if name.endswith(".dir"):
        try:
            members = [str(entry["md5"]) for entry in json.loads(path.read_bytes())]
        except (ValueError, TypeError, KeyError):
            return
        for member in members:
            yield from _with_members(repo, member)


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def relative(path: Path, root: Path) -> str:
    """The path as a person at `root` would type it."""
    return os.path.relpath(path, root)
