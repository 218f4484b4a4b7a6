"""The graph, the hashes and the cache of a project, from DVC's Python packages; no other module imports them.

DVC documents its commands, not these names. They are checked at import, so that a DVC that has renamed one fails with
one line.
"""

import copy
import hashlib
import inspect
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dvc.config import Config, merge
from dvc.data_cloud import DataCloud
from dvc.dependency.param import ParamsDependency
from dvc.exceptions import DvcException
from dvc.lock import LockError
from dvc.output import Output
from dvc.repo import Repo
from dvc.repo.reproduce import get_active_graph, plan_repro
from dvc.stage import Stage
from dvc.utils import hydra
from dvc.utils.serialize import dumps_yaml, parse_yaml, parse_yaml_for_update
from dvc_data.hashfile.build import build
from dvc_data.hashfile.hash_info import HashInfo
from dvc_data.hashfile.state import StateNoop

from rlhf_core import files
from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE
from tasks.tracking.settings import without_credentials

LOCK_FILE = "dvc.lock"
CHUNK_BYTES = 2**20
PATIENCE_SECONDS = 600.0
"""How long to wait for another DVC process that holds the lock of the project."""

PARAMETERS = {
    Repo: ("root_dir",),
    DataCloud.pull: ("objs",),
    HashInfo: ("name", "value"),
    build: ("odb", "path", "fs", "name", "ignore", "dry_run"),
    get_active_graph: ("graph",),
    plan_repro: ("graph", "stages"),
    parse_yaml: ("text", "path"),
    parse_yaml_for_update: ("text", "path"),
    dumps_yaml: ("d",),
    StateNoop: (),
    hydra.apply_overrides: ("path", "overrides"),
    hydra.to_hydra_overrides: ("path_overrides",),
}
ATTRIBUTES = {
    Repo: ("index", "dvcignore", "fs", "close", "brancher"),
    DataCloud: ("push",),
    Config: ("read", "edit", "load_one"),
    Output: ("get_hash", "exists", "dvcignore", "status", "changed_cache"),
    Stage: ("changed_stage", "is_callback"),
    ParamsDependency: ("status", "get_hash", "read_params"),
}


def check_dvc() -> None:
    """Raise ImportError naming what the installed DVC lacks."""
    missing = [f"{_name(one)}.{name}" for one, names in ATTRIBUTES.items() for name in names if not hasattr(one, name)]
    missing += [
        f"{_name(one)}({name})"
        for one, names in PARAMETERS.items()
        for name in names
        if name not in inspect.signature(one).parameters
    ]
    if missing:
        raise _changed(", ".join(missing))


def _changed(what: str) -> ImportError:
    return ImportError(
        f"dvc {version('dvc')} or dvc-data {version('dvc-data')} has changed what tasks/stage/dvc_adapter.py uses: "
        f"{what}; install the versions of constraints.txt"
    )


def _name(one: Any) -> str:
    return f"{one.__module__}.{one.__qualname__}"


check_dvc()
logging.getLogger("zc.lockfile").setLevel(logging.CRITICAL)  # a busy lock is not an error: `_locked` waits


@dataclass(frozen=True)
class File:
    """A file or folder that a stage reads or writes."""

    path: str
    """As dvc.yaml has it, or relative to the project for data of a .dvc file."""
    recorded: str | None
    """The hash in dvc.lock or in the .dvc file."""
    _item: Any

    @property
    def exists(self) -> bool:
        """Whether it is in the workspace."""
        return bool(self._item.exists)

    @property
    def is_cached(self) -> bool:
        """Whether DVC's cache holds the recorded content; true for what DVC does not cache."""
        if not self._item.use_cache:
            return True
        return self.recorded is not None and Path(self._item.repo.cache.local.oid_to_path(self.recorded)).exists()

    @property
    def is_whole(self) -> bool:
        """Whether DVC's cache holds the recorded content with every file of a folder."""
        return bool(self._item.use_cache) and not self._item.changed_cache()

    def known_hash(self) -> str:
        """DVC's hash. DVC reads the bytes only when time, size or inode are new. Raises UserError."""
        try:
            return str(self._item.get_hash().value)
        except DvcException as error:
            raise UserError(f"{self.path}: DVC cannot read it: {_one_line(error)}") from error

    def content_hash(self) -> str:
        """The hash from all bytes, read now."""
        item = self._item
        return str(_read(item.repo, item.fs_path, item.dvcignore, item.fs, item.hash_name).hash_info.value)


@dataclass(frozen=True)
class GraphStage:
    """A stage of dvc.yaml that has a command."""

    name: str
    address: str
    """Its name in `dvc repro`, from the folder of the project."""
    command: str
    inputs: tuple[File, ...]
    params: tuple[str, ...]
    """Names of the tracked parameters."""
    params_files: tuple[str, ...]
    """The files that they are in, from the folder of the project."""
    recorded_params: Mapping[str, Any]
    command_changed: bool
    """Whether dvc.lock has another command, or none."""
    outs: tuple[File, ...]
    _stage: Any

    def changed_params(self) -> list[str]:
        """`params.yaml: name` of every parameter whose value is not the recorded one."""
        changed: list[str] = []
        for dep in self._stage.deps:
            for file, keys in dep.status().items() if isinstance(dep, ParamsDependency) else ():
                changed += [str(file)] if isinstance(keys, str) else [f"{file}: {key}" for key in keys]
        return changed


@dataclass(frozen=True)
class Changes:
    """What differs now from the record of a stage, or of a .dvc file, in dvc.lock."""

    recorded: bool
    """Whether there is a record at all."""
    made_here: bool
    """Whether one of its outputs is in the workspace or in DVC's cache; of those that DVC caches, where there are
    any. dvc.lock and metrics come with a clone."""
    command: bool
    always_runs: bool
    recorded_params: Mapping[str, Any]
    """The recorded values of the tracked parameters that changed; without those that were unset."""
    present_params: Mapping[str, Any]
    """The same, now."""
    inputs: Mapping[str, str]
    """Path of a changed input -> DVC's word for it: modified, deleted or new."""
    outs: Mapping[str, str]
    """Path of a changed output -> modified, deleted, new or not in cache."""


@dataclass(frozen=True)
class Cached:
    """Objects of the cache that outputs in dvc.lock need: how many, their bytes, and those with other bytes than those
    of their name."""

    objects: int
    size: int
    corrupt: list[Path]


@dataclass(frozen=True)
class Stored:
    """A file in DVC's cache."""

    path: Path

    def read(self) -> bytes:
        """All bytes. Raises UserError where they are not those of the hash."""
        self.check()
        return self.path.read_bytes()

    def copy(self, target: Path) -> None:
        """Copy the file. Raises UserError where its bytes are not those of the hash; nothing is at `target` then."""
        shutil.copyfile(self.path, target)
        try:
            self.check(target)
        except UserError:
            target.unlink()
            raise

    def check(self, copy: Path | None = None) -> None:
        """Raise UserError where the bytes, or those of the copy, are not those of the hash."""
        if _md5(copy or self.path) != self.path.parent.name + self.path.name.removesuffix(".dir"):
            raise UserError(
                f"{self.path}: other bytes than those of its hash (a damaged cache); delete it, then `dvc fetch` or "
                "`dvc repro` brings it back; `leash doctor` finds what else is damaged"
            )


class Project:
    """A project as DVC reads it; `open_project` makes one."""

    def __init__(self, repo: Repo) -> None:
        self._repo = repo
        self.root = Path(repo.root_dir)
        all_stages = list(repo.index.stages)
        self.stages = tuple(self._stage(stage) for stage in all_stages if stage.cmd)
        """In the order of dvc.yaml."""
        self.tracked = tuple(self._file(out) for stage in all_stages if not stage.cmd for out in stage.outs)
        """Data of .dvc files."""

    def _stage(self, stage: Any) -> GraphStage:
        params = [dep for dep in stage.deps if isinstance(dep, ParamsDependency)]
        return GraphStage(
            name=stage.name,
            address=_address(stage, self.root),
            command=str(stage.cmd),
            inputs=tuple(File(dep.def_path, _recorded(dep), dep) for dep in stage.deps if dep not in params),
            params=tuple(name for dep in params for name in dep.params),
            params_files=tuple(dep.def_path for dep in params),
            recorded_params={k: v for dep in params for k, v in (dep.hash_info.value or {}).items()},
            command_changed=bool(stage.cmd_changed),
            outs=tuple(File(out.def_path, _recorded(out), out) for out in stage.outs),
            _stage=stage,
        )

    def _file(self, out: Any) -> File:
        return File(Path(out.fs_path).resolve().relative_to(self.root.resolve()).as_posix(), _recorded(out), out)

    def changes(self, address: str) -> Changes:
        """What differs from the record. Files and params.yaml are read now; dvc.lock was read when this was opened."""
        (stage,) = [one for one in self._repo.index.stages if _address(one, self.root) == address]
        deps = [] if stage.frozen else stage.deps
        before: dict[str, Any] = {}
        now: dict[str, Any] = {}
        inputs: dict[str, str] = {}
        for dep in deps:
            states = dep.status()
            state = next(iter(states.values()), None)
            if isinstance(dep, ParamsDependency) and isinstance(state, Mapping):
                recorded, present = dep.hash_info.value or {}, dep.read_params()
                before |= {name: recorded[name] for name in state if name in recorded}
                now |= {name: present[name] for name in state if name in present}
            elif state is not None:
                inputs[dep.def_path] = str(state)
        return Changes(
            recorded=not stage.cmd or any(one.hash_info for one in (*stage.deps, *stage.outs)),
            made_here=not stage.outs
            or any(
                out.exists or not out.changed_cache()
                for out in [one for one in stage.outs if one.use_cache] or stage.outs
            ),
            command=bool(stage.changed_stage()),
            always_runs=not stage.frozen and bool(stage.is_callback or stage.always_changed),
            recorded_params=before,
            present_params=now,
            inputs=inputs,
            outs={out.def_path: str(next(iter(states.values()))) for out in stage.outs if (states := out.status())},
        )

    def is_recorded(self, address: str) -> bool:
        """Whether dvc.lock has the result of the present command, parameters and inputs. A missing input counts as
        recorded where dvc.lock or a .dvc file has the same hash for it, a missing file of parameters where a stage
        makes it; outputs may be missing."""
        changes = self.changes(address)
        (stage,) = self._selected(address)
        made = {out.path: out.recorded for out in (*self.tracked, *(out for one in self.stages for out in one.outs))}
        missing = {file.path for file in stage.inputs if file.recorded and made.get(file.path) == file.recorded}
        missing |= made.keys() - {file.path for file in stage.inputs}
        return (
            changes.recorded
            and not (changes.command or changes.always_runs or changes.recorded_params or changes.present_params)
            and all(state == "deleted" and path in missing for path, state in changes.inputs.items())
            and set(changes.outs.values()) <= {"deleted", "not in cache"}
        )

    def makers_of_params(self, address: str) -> set[str]:
        """The stages that make a file of parameters of this stage."""
        (stage,) = self._selected(address)
        files = {dep.fs_path for dep in stage._stage.deps if isinstance(dep, ParamsDependency)}
        return {one.address for one in self.stages if any(out._item.fs_path in files for out in one.outs)}

    def missing_outs(self, address: str) -> tuple[File, ...]:
        """The outputs of a stage or .dvc file that are missing here or in DVC's cache."""
        missing = self.changes(address).outs
        (stage,) = [one for one in self._repo.index.stages if _address(one, self.root) == address]
        return tuple(File(out.def_path, _recorded(out), out) for out in stage.outs if out.def_path in missing)

    def can_be_shared(self, name: str) -> bool:
        """Whether DVC's run cache can hold results of the stage: it holds none with an output that stays in place when
        the stage runs (`persist`)."""
        (stage,) = [one for one in self._repo.index.stages if _address(one, self.root) == name]
        return not any(out.persist for out in stage.outs)

    def plan(self) -> list[tuple[str, list[str], list[str]]]:
        """(stage, the stages whose outputs it reads, the .dvc files that it reads) in the order of `dvc repro`."""
        graph = get_active_graph(self._repo.index.graph)
        own = [node for node in graph if _address(node, self.root) == getattr(node, "name", None)]
        nodes = [node for node in plan_repro(graph, own) if node.cmd] if own else []
        above = {_address(node, self.root): list(graph.successors(node)) for node in nodes}
        return [
            (
                name,
                [_address(other, self.root) for other in others if other.cmd],
                [_address(other, self.root) for other in others if not other.cmd],
            )
            for name, others in above.items()
        ]

    def hash_at(self, path: Path) -> str | None:
        """The hash of what is at `path` (absolute; a file or folder), every byte read; None where nothing is."""
        return str(self._object(path).hash_info.value) if path.exists() else None

    def files_below(self, path: Path) -> list[str]:
        """The files in the hash of the folder at `path`, relative to it; [""] for a file."""
        return [""] if path.is_file() else ["/".join(key) for key, _, _ in self._object(path)]

    def _object(self, path: Path) -> Any:
        inside = path.resolve().is_relative_to(self.root.resolve())
        return _read(self._repo, str(path), self._repo.dvcignore if inside else None, self._repo.fs, "md5")

    def cached(self, digest: str) -> list[tuple[str, Path]]:
        """(path inside, file in DVC's cache) of everything in the folder with this hash; ("", file) for the hash of a
        file. Empty where the cache does not hold the file, or the listing of the folder."""
        return _members(self._repo, digest)

    def corrupt_outs(self, address: str | None = None) -> list[str]:
        """Outputs of a stage (None: of all) that are in the workspace with other bytes than dvc.lock names."""
        outs = [out for stage in self._selected(address) for out in stage.outs if out.recorded and out.exists]
        return [os.path.relpath(out._item.fs_path, self.root) for out in outs if out.content_hash() != out.recorded]

    def examine_cache(self, address: str | None = None) -> Cached:
        """Read every object of the cache that the outputs of a stage (None: of all) need, as far as it is there."""
        objects: set[Path] = set()
        for stage in self._selected(address):
            for digest in filter(None, (out.recorded for out in stage.outs)):
                members = [blob for _, blob in self.cached(digest)]
                objects.update(filter(Path.is_file, [Path(self._repo.cache.local.oid_to_path(digest)), *members]))
        corrupt = [path for path in sorted(objects) if _md5(path) != path.parent.name + path.name.removesuffix(".dir")]
        return Cached(len(objects), sum(path.stat().st_size for path in objects), corrupt)

    def _selected(self, address: str | None) -> Iterator[GraphStage]:
        return (stage for stage in self.stages if address in (None, stage.address))


@contextmanager
def open_project(root: Path) -> Iterator[Project]:
    """The project at `root` as DVC reads it now. Raises UserError where DVC cannot read it.

    DVC rewrites dvc.lock in place, for a second or more: it is read under DVC's own lock.
    """
    with _repository(root) as repo:
        with _locked(repo), _readable(root):
            project = Project(repo)
        yield project


def stored_files(root: Path, digest: str) -> dict[str, Stored]:
    """The files of the folder with this hash by their path inside ("" for the hash of a file), from the cache of the
    project at `root`; what the cache lacks is fetched from its default remote. Raises UserError where neither has it,
    or where the listing of the folder is damaged."""
    with _repository(root) as repo:
        listing = Stored(Path(repo.cache.local.oid_to_path(digest)))
        reason = _fetch(repo, [digest]) if not listing.path.is_file() else ""
        if listing.path.is_file():
            listing.check()
        found = _members(repo, digest)
        if missing := [blob.parent.name + blob.name for _, blob in found if not blob.is_file()]:
            reason = _fetch(repo, missing)
        if not found or not all(blob.is_file() for _, blob in found):
            raise UserError(f"{digest}: neither the DVC cache of {root} nor its remote has it{reason}")
        if outside := [path for path, _ in found if path.startswith("/") or ".." in Path(path).parts]:
            raise UserError(f"{digest}: a folder in DVC's cache with a path that leads out of it: {outside[0]}")
        return {path: Stored(blob) for path, blob in found}


def _fetch(repo: Repo, digests: Sequence[str]) -> str:
    """Fetch objects from the default remote into the cache; why it failed, in brackets."""
    try:
        repo.cloud.pull([HashInfo("md5", digest) for digest in digests])
    except Exception as error:  # each kind of remote has its own errors
        return f" ({without_credentials(_one_line(error))})"
    return ""


def _members(repo: Repo, digest: str) -> list[tuple[str, Path]]:
    blob = Path(repo.cache.local.oid_to_path(digest))
    if not blob.is_file():
        return []
    if not digest.endswith(".dir"):
        return [("", blob)]
    try:
        entries = json.loads(blob.read_bytes())
        return [(entry["relpath"], Path(repo.cache.local.oid_to_path(entry["md5"]))) for entry in entries]
    except (ValueError, TypeError, KeyError):
        return []


def read_lock_file(root: Path) -> str | None:
    """The text of dvc.lock, never in the middle of a rewrite; None where there is none. Raises UserError."""
    if not (root / LOCK_FILE).is_file():
        return None
    with _repository(root) as repo, _locked(repo):
        return (root / LOCK_FILE).read_text(encoding="utf-8", errors="replace")


def recorded_order(root: Path) -> tuple[str, ...]:
    """The stages that dvc.lock names, in its order; none where there is no such file. Raises UserError."""
    text = read_lock_file(root)
    if text is None:
        return ()
    with _readable(root):
        return tuple(parse_yaml(text, str(root / LOCK_FILE)).get("stages") or {})


def restore_order(root: Path, stages: Sequence[str], before: Sequence[str]) -> None:
    """Write the entries of dvc.lock in the order of one `dvc repro`, in DVC's own bytes. Raises UserError.

    DVC keeps the place of an existing entry (`before`: the order when the run began), and appends new entries in the
    order of the graph (`stages`). Stages that run side by side are entered as they end.
    """
    now = recorded_order(root)
    known = [name for name in before if name in now]
    new = [name for name in stages if name in now and name not in before]
    wanted = (*known, *new, *(name for name in now if name not in known and name not in new))
    if wanted == now:
        return
    path = root / LOCK_FILE
    with _repository(root) as repo, _locked(repo):
        content = parse_yaml_for_update(path.read_text(encoding="utf-8"), str(path))
        for name in wanted:
            content["stages"].move_to_end(name)
        with files.atomic(path) as place:
            place.write_text(dumps_yaml(content), encoding="utf-8")
            place.chmod(path.stat().st_mode)


def default_remote(root: Path) -> str:
    """The address of DVC's default remote. Raises UserError where there is none."""
    with _readable(root), _without_repository(root) as config:
        known = config.read()
    name = known.get("core", {}).get("remote")
    if name is None:
        raise UserError(
            "DVC has no default remote; `dvc remote add -d store /some/folder` or `dvc remote add -d store "
            "s3://bucket/folder` names one"
        )
    if name not in known.get("remote", {}):
        raise UserError(f"DVC's default remote {name!r} does not exist; `dvc remote add -d {name} ADDRESS` adds it")
    return str(known["remote"][name]["url"])


def push_uncached(root: Path, addresses: Sequence[str]) -> int:
    """Send metrics and plots that git tracks (`cache: false`) of these stages to the default remote; returns how many
    objects were sent. The run cache restores them with the other outputs, and `dvc push` leaves them out.

    Raises DVC's errors, and those of the remote's client.
    """
    with _repository(root) as repo, _locked(repo):
        outs = [out for one in repo.index.stages if _address(one, root) in addresses for out in one.outs]
        kept = {out.hash_info for out in outs if not out.use_cache and out.hash_info}
        present = {one for one in kept if Path(repo.cache.local.oid_to_path(one.value)).is_file()}
        return len(repo.cloud.push(present).transferred)


@dataclass(frozen=True)
class Objects:
    """Hashes of the objects that a checkout or a commit needs to restore its outputs and data."""

    cached: frozenset[str]
    uncached: frozenset[str]
    """Of metrics and plots that git tracks: only the run cache needs these."""

    @property
    def all(self) -> frozenset[str]:
        """Both."""
        return self.cached | self.uncached


def needed_objects(root: Path, commits: Sequence[str] = ()) -> dict[str, Objects]:
    """What the checkout at `root` ("workspace") and each of the commits needs. Commits without a DVC project are left
    out. Raises UserError where DVC cannot read one."""
    found = {}
    with _repository(root) as repo, _locked(repo), _readable(root), _silent():
        for name in repo.brancher(revs=list(commits), sha_only=True):
            used = {one.value for objects in repo.index.used_objs(force=True).values() for one in objects}
            outs = [out for stage in repo.index.stages for out in stage.outs if not out.use_cache]
            uncached = {str(out.hash_info.value) for out in outs if out.hash_info}
            found[name or "workspace"] = Objects(frozenset(used), frozenset(uncached))
    return found


@contextmanager
def _silent() -> Iterator[None]:
    """DVC warns of every object that is in no cache: the normal state of a clone."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def cache_folder(root: Path) -> Path:
    """The folder of the objects in DVC's cache."""
    with _repository(root) as repo:
        return Path(repo.cache.local.path).resolve()


def cache_objects(root: Path) -> dict[str, int]:
    """The bytes of each object in DVC's cache, by its hash."""
    folder = cache_folder(root)
    return {path.parent.name + path.name: path.stat().st_size for path in folder.glob("[0-9a-f][0-9a-f]/*")}


def make_holder(root: Path, folder: Path, objects: Sequence[str]) -> None:
    """Make a DVC project in the git repository at `folder` that needs these objects of the cache of the project at
    `root`, for `dvc gc --projects`."""
    with _repository(root) as repo, _without_repository(folder) as config, config.edit("local") as local:
        local["core"] = {"analytics": False, "site_cache_dir": str(folder / "site")}
        local["cache"] = {"dir": repo.cache.legacy.path}
    outs = [{"md5": one, "hash": "md5", "path": f"object-{index}"} for index, one in enumerate(objects)]
    (folder / "objects.dvc").write_text(dumps_yaml({"outs": outs}), encoding="utf-8")


def configure_workspace(home: Path, root: Path, site: Path, cache: Path | None) -> None:
    """Give the project at `root` the DVC remotes of the one at `home`, and its cache, or an own one at `cache`. `site`
    holds DVC's database of hashes. What the user has configured for all projects is not copied. Raises UserError."""
    with _readable(home), _without_repository(home) as ours, _without_repository(root) as theirs:
        known = ours.read()
        remotes = ours.read("repo")["remote"]
        merge(remotes, ours.read("local")["remote"])
        shared = known.get("cache", {}).get("dir") or home / ".dvc" / "cache"
        with theirs.edit("local") as local:
            local["core"] = {"analytics": False, "autostage": False, "site_cache_dir": str(site)} | (
                {"remote": known["core"]["remote"]} if "remote" in known.get("core", {}) else {}
            )
            local["cache"] = dict(known.get("cache", {})) | {"dir": str(cache or shared)}
            local["remote"] = remotes
        (root / ".dvc" / "config.local").chmod(0o600)  # it may hold keys


@contextmanager
def _without_repository(root: Path) -> Iterator[Config]:
    """The configuration of a project, which need not have a git repository or a dvc.yaml."""
    (root / ".dvc").mkdir(exist_ok=True)
    yield Config(str(root / ".dvc"))


@dataclass(frozen=True)
class Override:
    """One override in Hydra's grammar. `values` are those to try, in Hydra's own words: one, those of a list or choice,
    or those of a range; `interval` holds the ends of an interval, which has no values."""

    name: str
    values: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None
    logarithmic: bool = False
    whole: bool = False


def parse_override(text: str) -> Override:
    """`NAME=VALUE`, `NAME=A,B`, `NAME=choice(A,B)`, `NAME=range(START,STOP,STEP)` (numbers from START, below STOP),
    `NAME=interval(LOW,HIGH)`, `NAME=int(interval(…))` or `NAME=tag(log,interval(…))`. Raises UserError."""
    try:
        (parsed,) = hydra.to_hydra_overrides([text])
        if not parsed.is_sweep_override():
            return Override(parsed.key_or_group, (text.partition("=")[2],))
        value = parsed.value()
        if parsed.is_interval_sweep():
            ends = (float(value.start), float(value.end))
            return Override(parsed.key_or_group, (), ends, "log" in value.tags, isinstance(value.start, int))
        return Override(parsed.key_or_group, tuple(map(str, parsed.sweep_string_iterator())))
    except Exception as error:  # of hydra, omegaconf and antlr
        reason = _one_line(error).split(" See https://")[0]
        raise UserError(f"-S {text}: {reason}; write NAME=VALUE, NAME=A,B or NAME=range(1,4)") from None


def apply_overrides(root: Path, overrides: Sequence[str]) -> None:
    """Change params.yaml; comments and what is not named stay. Raises UserError, naming the override."""
    for one in overrides:
        try:
            hydra.apply_overrides(str(root / PARAMS_FILE), [one])
        except DvcException as error:
            reason = _one_line(error.__cause__ or error).split(" full_key:")[0]
            raise UserError(f"-S {one}: {reason}") from None


@contextmanager
def _repository(root: Path) -> Iterator[Repo]:
    with _readable(root):
        repo = Repo(str(root))
    try:
        yield repo
    finally:
        repo.close()


@contextmanager
def _readable(root: Path) -> Iterator[None]:
    """Turn DVC's errors into one line that names the file."""
    try:
        yield
    except DvcException as error:
        reason = _one_line(error).replace(f"{root}{os.sep}", "")
        if LOCK_FILE in reason:
            raise UserError(
                f"dvc.lock is broken ({reason}); `git checkout dvc.lock` brings back the committed one, and what DVC's "
                "cache has is not made again"
            ) from error
        raise UserError(f"dvc.yaml: DVC cannot read the graph: {reason}") from error
    except AttributeError as error:
        raise _changed(str(error)) from error


@contextmanager
def _locked(repo: Repo) -> Iterator[None]:
    """Hold DVC's lock of the project, as its writers do. A `dvc repro` releases it while its stage runs."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    waited = False
    while True:
        try:
            repo.lock.lock()
            break
        except LockError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{repo.lock.lockfile}: another DVC process has held this lock for {PATIENCE_SECONDS:.0f} s; wait "
                    "for its end or stop it, then run again"
                ) from None
        if not waited:
            print("waiting for another DVC process to finish (.dvc/tmp/lock)", file=sys.stderr, flush=True)
            waited = True
    try:
        yield
    finally:
        repo.lock.unlock()


def _address(stage: Any, root: Path) -> str:
    """DVC's own address of a stage depends on the current folder."""
    path = os.path.relpath(stage.path, root)
    name = getattr(stage, "name", None)
    if name is None:
        return path
    return str(name) if path == "dvc.yaml" else f"{path}:{name}"


def _recorded(item: Any) -> str | None:
    return str(item.hash_info.value) if item.hash_info else None


def _read(repo: Repo, path: str, ignore: Any, system: Any, kind: str) -> Any:
    """DVC's object of a file or folder, from its bytes: DVC's database of hashes is neither read nor written."""
    store = copy.copy(repo.cache.local)
    store.state = StateNoop()
    _, _, found = build(store, path, system, kind, ignore=ignore, dry_run=True)
    return found


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
