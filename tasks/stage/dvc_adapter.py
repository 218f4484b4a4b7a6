"""What the driver and its commands need of DVC's Python packages; no other module imports them, and no stage does.

DVC documents its commands, not these names: pyproject.toml allows only versions that have them.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dvc.config import Config, merge
from dvc.exceptions import DvcException
from dvc.repo import Repo
from dvc.utils import hydra
from dvc_data.hashfile.hash_info import HashInfo

from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE
from tasks.stage.dvc_files import Project, Stored, cache_folder, locked
from tasks.tracking.settings import without_credentials


def stored_files(root: Path, digest: str) -> dict[str, Stored]:
    """The files of the folder with this hash by their path inside ("" for the hash of a file), from the cache of the
    project at `root`; what the cache lacks is fetched from its default remote. Raises UserError where neither has it,
    or where the listing of the folder is damaged."""
    project = Project(root.absolute())
    listing = Stored(project.blob(digest))
    reason = fetch_objects(root, [listing.path]) or fetch_objects(root, [blob for _, blob in project.cached(digest)])
    if listing.path.is_file():
        listing.check()
    found = project.cached(digest)
    if not found or not all(blob.is_file() for _, blob in found):
        raise UserError(f"{digest}: neither the DVC cache of {root} nor its remote has it{reason}")
    if outside := [path for path, _ in found if path.startswith("/") or ".." in Path(path).parts]:
        raise UserError(f"{digest}: a folder in DVC's cache with a path that leads out of it: {outside[0]}")
    return {path: Stored(blob) for path, blob in found}


def fetch_objects(root: Path, blobs: Iterable[Path]) -> str:
    """Fetch those of these objects of DVC's cache that it lacks from the default remote; returns why that failed, in
    brackets. Empty where it did not fail, also where the remote lacks one."""
    lacking = [HashInfo("md5", blob.parent.name + blob.name) for blob in blobs if not blob.is_file()]
    if lacking:
        with _repository(root) as repo:
            logging.disable(logging.WARNING)  # DVC lists each object that the remote lacks
            try:
                repo.cloud.pull(lacking)
            except Exception as error:  # each kind of remote has its own errors
                return f" ({without_credentials(_one_line(error))})"
            finally:
                logging.disable(logging.NOTSET)
    return ""


def default_remote(root: Path) -> str:
    """The address of DVC's default remote. Raises UserError where there is none."""
    with _readable(root):
        known = _configuration(root).read()
    name = known.get("core", {}).get("remote")
    if name is None:
        raise UserError(
            "DVC has no default remote; `dvc remote add -d store /some/folder` or `dvc remote add -d store "
            "s3://bucket/folder` names one"
        )
    if name not in known.get("remote", {}):
        raise UserError(f"DVC's default remote {name!r} does not exist; `dvc remote add -d {name} ADDRESS` adds it")
    return str(known["remote"][name]["url"])


def push_uncached(root: Path) -> int:
    """Send what git tracks of the outputs (`cache: false`: metrics/summary.json) to the default remote; returns how
    many objects were sent. The run cache restores it with the other outputs, and `dvc push` leaves it out.

    Raises DVC's errors, and those of the remote's client.
    """
    with _repository(root) as repo, locked(root):
        outs = [out for stage in repo.index.stages for out in stage.outs if not out.use_cache and out.hash_info]
        present = {out.hash_info for out in outs if Path(repo.cache.local.oid_to_path(out.hash_info.value)).is_file()}
        return len(repo.cloud.push(present).transferred)


def needed_objects(root: Path, commits: Sequence[str] = ()) -> dict[str, set[str]]:
    """Hashes of the objects that the checkout at `root` ("workspace") and each of the commits needs to restore its
    outputs and data, with the outputs that git tracks: the run cache restores those. Commits without a DVC project are
    left out. Raises UserError where DVC cannot read one."""
    found = {}
    with _repository(root) as repo, locked(root), _readable(root):
        logging.disable(logging.WARNING)  # of every object that is in no cache: the normal state of a clone
        try:
            for name in repo.brancher(revs=list(commits), sha_only=True):
                used = {one.value for objects in repo.index.used_objs(force=True).values() for one in objects}
                outs = [out for stage in repo.index.stages for out in stage.outs if not out.use_cache]
                found[name or "workspace"] = used | {str(out.hash_info.value) for out in outs if out.hash_info}
        finally:
            logging.disable(logging.NOTSET)
    return found


def cache_objects(root: Path) -> dict[str, int]:
    """The bytes of each object in DVC's cache, by its hash."""
    folder = cache_folder(root)
    return {path.parent.name + path.name: path.stat().st_size for path in folder.glob("[0-9a-f][0-9a-f]/*")}


def configure_workspace(home: Path, root: Path, site: Path, cache: Path | None) -> None:
    """Give the project at `root` the DVC remotes of the one at `home`, and its cache, or an own one at `cache`. `site`
    holds DVC's database of hashes. What the user has configured for all projects is not copied. Raises UserError."""
    with _readable(home):
        ours = _configuration(home)
        known = ours.read()
        remotes = ours.read("repo")["remote"]
        merge(remotes, ours.read("local")["remote"])
        shared = known.get("cache", {}).get("dir") or home / ".dvc" / "cache"
        with _configuration(root).edit("local") as local:
            local["core"] = {"analytics": False, "autostage": False, "site_cache_dir": str(site)} | (
                {"remote": known["core"]["remote"]} if "remote" in known.get("core", {}) else {}
            )
            local["cache"] = dict(known.get("cache", {})) | {"dir": str(cache or shared)}
            local["remote"] = remotes
        (root / ".dvc" / "config.local").chmod(0o600)  # it may hold keys


def _configuration(root: Path) -> Config:
    """That of a project, which need not have a git repository or a dvc.yaml."""
    (root / ".dvc").mkdir(exist_ok=True)
    return Config(str(root / ".dvc"))


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
    """Change params.yaml, or add what has its default; comments and what is not named stay. Raises UserError, naming
    the override."""
    for one in overrides:  # ruamel.yaml writes no valid file where a block with a comment is removed and added at once
        _apply(root / PARAMS_FILE, one)


def overridden(content: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The content of params.yaml with the overrides, all at once. Raises UserError as `apply_overrides`."""
    with TemporaryDirectory(prefix="leash-") as folder:
        file = Path(folder) / "params.json"
        text = json.dumps(content, default=str)  # a date, which no parameter is, as text
        file.write_text(text, encoding="utf-8")
        try:
            _apply(file, *overrides)
        except UserError:
            for one in overrides:  # which of them it is
                _apply(file, one)
            raise
        changed: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return changed


def _apply(file: Path, *overrides: str) -> None:
    try:
        hydra.apply_overrides(str(file), [one if one.startswith(("+", "~")) else f"++{one}" for one in overrides])
    except DvcException as error:
        reason = _one_line(error.__cause__ or error).split(" full_key:")[0]
        raise UserError(f"-S {overrides[0]}: {reason}") from None


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
        raise UserError(f"dvc.yaml or dvc.lock: DVC cannot read the graph: {reason}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
