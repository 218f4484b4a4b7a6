"""What the driver and its commands need of DVC's Python packages; no other module imports them, and no stage does.

DVC documents its commands, not these names. They are checked at import, so that a DVC that has renamed one fails with
one line; pyproject.toml allows only versions that have them.
"""

import inspect
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dvc.config import Config, merge
from dvc.data_cloud import DataCloud
from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc.utils import hydra
from dvc_data.hashfile.hash_info import HashInfo

from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE
from tasks.stage.dvc_files import LOCK_FILE, Project, Stored, cache_folder, locked
from tasks.tracking.settings import without_credentials

PARAMETERS = {
    Repo: ("root_dir",),
    DataCloud.pull: ("objs",),
    HashInfo: ("name", "value"),
    hydra.apply_overrides: ("path", "overrides"),
    hydra.to_hydra_overrides: ("path_overrides",),
}
ATTRIBUTES = {
    Repo: ("index", "close", "brancher"),
    DataCloud: ("push",),
    Config: ("read", "edit", "load_one"),
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


def stored_files(root: Path, digest: str) -> dict[str, Stored]:
    """The files of the folder with this hash by their path inside ("" for the hash of a file), from the cache of the
    project at `root`; what the cache lacks is fetched from its default remote. Raises UserError where neither has it,
    or where the listing of the folder is damaged."""
    with _repository(root) as repo:
        project = Project(root.absolute())
        listing = Stored(project.blob(digest))
        reason = _fetch(repo, [digest]) if not listing.path.is_file() else ""
        if listing.path.is_file():
            listing.check()
        found = project.cached(digest)
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
    with _repository(root) as repo, locked(root):
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
    with _repository(root) as repo, locked(root), _readable(root), _silent():
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


def cache_objects(root: Path) -> dict[str, int]:
    """The bytes of each object in DVC's cache, by its hash."""
    folder = cache_folder(root)
    return {path.parent.name + path.name: path.stat().st_size for path in folder.glob("[0-9a-f][0-9a-f]/*")}


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


def _address(stage: Any, root: Path) -> str:
    """DVC's own address of a stage depends on the current folder."""
    path = os.path.relpath(stage.path, root)
    name = getattr(stage, "name", None)
    if name is None:
        return path
    return str(name) if path == "dvc.yaml" else f"{path}:{name}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
