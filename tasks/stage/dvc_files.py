"""A DVC project as its files describe it: dvc.yaml, dvc.lock, .dvc files, .dvcignore and the cache, all of documented
formats. DVC itself is not imported, so that a stage runs with any version of it."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pathspec import GitIgnoreSpec
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from tasks.params.loader import PARAMS_FILE

GRAPH_FILE, LOCK_FILE = "dvc.yaml", "dvc.lock"
CHUNK_BYTES = 2**20
PATIENCE_SECONDS = 600.0
"""How long to wait for another DVC process that holds the lock of the project."""
HASHES = Path("work") / "hashes.json"
"""Path -> [size, time, inode, MD5] of the files read before."""
SETTLED_SECONDS = 0.1
"""A file changed less than this ago is not remembered: another change may leave its time as it is."""
NEVER_DATA = (".git", ".hg", ".dvc")
TEMPLATES = ("foreach", "matrix", "wdir")
OUTS = ("outs", "metrics", "plots")


def md5_of(path: Path) -> str:
    """The MD5 of a file's bytes."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class Hashes:
    """DVC's hashes of files and folders below `root`. A folder's is the MD5 of the JSON list of its files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ignored: dict[str, GitIgnoreSpec | None] = {}
        self._read: set[str] = set()
        """Paths whose bytes this object has read."""
        self._changed = False
        try:
            self._known = dict(json.loads((root / HASHES).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            self._known = {}

    def of(self, path: Path, read: bool = False) -> str | None:
        """The hash of the file or folder at `path` (absolute); None where nothing is. The hash of a file whose size,
        time and inode are unchanged is remembered; with `read` only that of one that this object has read."""
        if path.is_dir():
            listing = [{"md5": self._of_file(path / name, read), "relpath": name} for name in self.files(path)]
            return hashlib.md5(json.dumps(listing).encode(), usedforsecurity=False).hexdigest() + ".dir"
        return self._of_file(path, read) if path.is_file() else None

    def files(self, folder: Path) -> list[str]:
        """The files below a folder that DVC does not ignore, relative to it, in the order of DVC's list."""
        found = []
        for here, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not self.is_ignored(f"{here}/{name}", True)]
            found += [f"{here}/{name}" for name in names if not self.is_ignored(f"{here}/{name}", False)]
        return sorted(name[len(str(folder)) + 1 :] for name in found)

    def is_ignored(self, path: str, is_folder: bool) -> bool:
        """Whether a .dvcignore file above it names it. Only paths in the project are ignored."""
        name, above = os.path.basename(path), os.path.dirname(path)  # noqa: PTH119, PTH120 - a thousand times a run
        if not f"{above}/".startswith(f"{self.root}/"):
            return False
        if name in NEVER_DATA or (is_folder and os.path.isdir(f"{path}/.dvc")):  # noqa: PTH112
            return True
        while len(above) >= len(str(self.root)):
            if above not in self._ignored:
                file = Path(above) / ".dvcignore"
                lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
                rules = [line.strip() for line in lines if line.strip()]
                self._ignored[above] = GitIgnoreSpec.from_lines(rules) if rules else None
            rules_here = self._ignored[above]
            if rules_here and rules_here.match_file(path[len(above) + 1 :] + "/" * is_folder):
                return True
            above = os.path.dirname(above)  # noqa: PTH120
        return False

    def save(self) -> None:
        """Remember what was read, for the next process. Another process may write at the same time: the last wins. What
        cannot be written is read again."""
        if not self._changed or not (self.root / HASHES.parent).is_dir():
            return
        present = {name: entry for name, entry in self._known.items() if os.path.exists(name)}  # noqa: PTH110
        place = self.root / HASHES.with_name(f".{HASHES.name}.{os.getpid()}")
        try:
            place.write_text(json.dumps(present), encoding="utf-8")
            place.replace(self.root / HASHES)
        except OSError:
            place.unlink(missing_ok=True)
        self._changed = False

    def _of_file(self, path: Path, read: bool) -> str:
        name = str(path)
        try:
            now = path.stat()
            stamp = [now.st_size, now.st_mtime_ns, now.st_ino]
            entry = self._known.get(name)
            if entry and entry[:3] == stamp and (name in self._read or not read):
                return str(entry[3])
            digest = md5_of(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        if time.time() - now.st_mtime > SETTLED_SECONDS:
            self._known[name], self._changed = [*stamp, digest], True
            self._read.add(name)
        return digest


@dataclass(frozen=True)
class File:
    """A file or folder that a stage reads or writes."""

    path: str
    """As dvc.yaml has it, or relative to the project for data of a .dvc file."""
    recorded: str | None
    """The hash in dvc.lock or in the .dvc file."""
    in_cache: bool
    """Whether it is an output that DVC's cache holds."""
    _project: "Project"

    @property
    def place(self) -> Path:
        """Where it is."""
        return self._project.root / self.path

    @property
    def exists(self) -> bool:
        """Whether it is in the workspace."""
        return self.place.exists()

    @property
    def is_cached(self) -> bool:
        """Whether DVC's cache holds the recorded content with every file of a folder; true for what it does not
        cache."""
        if not self.in_cache:
            return True
        members = self._project.cached(self.recorded) if self.recorded else []
        whole = all(blob.is_file() for _, blob in members)
        return whole and (bool(members) or (bool(self.recorded) and self._project.blob(str(self.recorded)).is_file()))

    def known_hash(self) -> str:
        """The present hash. Bytes are read only where time, size or inode are new. Raises UserError for a missing
        file."""
        return self._hash(read=False)

    def content_hash(self) -> str:
        """The hash from bytes that this process has read."""
        return self._hash(read=True)

    def _hash(self, read: bool) -> str:
        digest = self._project.hashes.of(self.place, read)
        if digest is None:
            raise UserError(f"{self.path}: file not found")
        return digest


@dataclass(frozen=True)
class GraphStage:
    """A stage of dvc.yaml."""

    name: str
    command: str
    inputs: tuple[File, ...]
    params_of: Mapping[str, tuple[str, ...] | None]
    """File of parameters -> the tracked names in it; None: all of them."""
    recorded_params: Mapping[str, Any]
    command_changed: bool
    """Whether dvc.lock has another command, or none."""
    outs: tuple[File, ...]
    is_recorded: bool
    """Whether dvc.lock has an entry at all."""
    always_runs: bool
    frozen: bool
    _project: "Project"

    @property
    def params(self) -> tuple[str, ...]:
        """Names of the tracked parameters."""
        return tuple(name for names in self.params_of.values() for name in names or ())

    @property
    def params_files(self) -> tuple[str, ...]:
        """The files that they are in."""
        return tuple(self.params_of)

    def present_params(self) -> dict[str, Any]:
        """The values now, without those that are unset. Raises UserError where a file is missing or cannot be read."""
        found: dict[str, Any] = {}
        for file, names in self.params_of.items():
            content = _read_params(self._project.root / file, file)
            for name in content if names is None else names:
                value: Any = content
                for part in name.split("."):
                    value = value.get(part, _UNSET) if isinstance(value, Mapping) else _UNSET
                if value is not _UNSET:
                    found[name] = value
        return found

    def changed_params(self) -> list[str]:
        """`params.yaml: name` of every parameter whose value is not the recorded one."""
        present, files = self.present_params(), {name: file for file in self.params_of for name in self.names_in(file)}
        names = dict.fromkeys((*present, *self.recorded_params))
        changed = [one for one in names if present.get(one, _UNSET) != self.recorded_params.get(one, _UNSET)]
        return [f"{files.get(name, PARAMS_FILE)}: {name}" for name in changed]

    def names_in(self, file: str) -> tuple[str, ...]:
        """The tracked names in one file of parameters."""
        names = self.params_of[file]
        return names if names is not None else tuple(_read_params(self._project.root / file, file))


_UNSET: Any = object()


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
        if md5_of(copy or self.path) != name_of(self.path):
            raise UserError(
                f"{self.path}: other bytes than those of its hash (a damaged cache); delete it, then `dvc fetch` or "
                "`dvc repro` brings it back; `leash doctor` finds what else is damaged"
            )


def name_of(blob: Path) -> str:
    """The MD5 that the bytes of an object in DVC's cache must have."""
    return blob.parent.name + blob.name.removesuffix(".dir")


class Project:
    """A project as its files describe it; `open_project` makes one."""

    def __init__(self, root: Path) -> None:
        """Raises UserError where a file cannot be read."""
        self.root = root
        self.hashes = Hashes(root)
        graph, lock = _read(root / GRAPH_FILE), _read(root / LOCK_FILE)
        entries = lock.get("stages") or {}
        stages = graph.get("stages") or {}
        if not isinstance(entries, dict) or not isinstance(stages, dict):
            raise _unreadable(LOCK_FILE if isinstance(stages, dict) else GRAPH_FILE, "`stages` is no mapping")
        self.stages = tuple(self._stage(name, entry, entries.get(name)) for name, entry in stages.items())
        """In the order of dvc.yaml."""
        self.sources: dict[str, tuple[File, ...]] = dict(self._dvc_files())
        """.dvc file -> its data."""
        self.tracked = tuple(file for files in self.sources.values() for file in files)
        """Data of .dvc files."""

    def _stage(self, name: str, entry: Any, record: Any) -> GraphStage:
        if used := [key for key in TEMPLATES if key in entry] if isinstance(entry, dict) else []:
            raise _unreadable(GRAPH_FILE, f"stage {name} uses `{used[0]}`, which `leash` does not; write it out")
        if not isinstance(entry, dict) or not entry.get("cmd"):
            raise _unreadable(GRAPH_FILE, f"stage {name} has no cmd")
        try:
            recorded = {
                one["path"]: one.get("md5") for part in ("deps", "outs") for one in (record or {}).get(part, [])
            }
            values: dict[str, Any] = {}
            params_of = _params(entry.get("params"))
            for file, names in params_of.items():
                found = ((record or {}).get("params") or {}).get(file) or {}
                values |= found if names is None else {name: found[name] for name in names if name in found}
        except (AttributeError, TypeError, KeyError):
            raise _unreadable(LOCK_FILE, f"the entry of {name}") from None
        outs = []
        for kind in OUTS:
            for out, options in _pairs(entry.get(kind)):
                in_cache = (options or {}).get("cache", True)
                outs.append(File(out, recorded.get(out), in_cache, self))
        command = entry["cmd"]
        return GraphStage(
            name=name,
            command=command if isinstance(command, str) else str(command),
            inputs=tuple(File(path, recorded.get(path), False, self) for path, _ in _pairs(entry.get("deps"))),
            params_of=params_of,
            recorded_params=values,
            command_changed=(record or {}).get("cmd") != command,
            outs=tuple(outs),
            is_recorded=record is not None,
            always_runs=bool(entry.get("always_changed")) or not (entry.get("deps") or entry.get("params") or outs),
            frozen=bool(entry.get("frozen")),
            _project=self,
        )

    def _dvc_files(self) -> Iterator[tuple[str, tuple[File, ...]]]:
        made = {str(self.root / out.path) for stage in self.stages for out in stage.outs}
        for here, folders, names in os.walk(self.root):
            folders[:] = sorted(
                one
                for one in folders
                if f"{here}/{one}" not in made and not self.hashes.is_ignored(f"{here}/{one}", True)
            )
            for name in sorted(names):
                if name.endswith(".dvc") and not self.hashes.is_ignored(f"{here}/{name}", False):
                    path = Path(here, name)
                    outs = _read(path).get("outs") or []
                    relative = path.parent.relative_to(self.root)
                    files = tuple(File((relative / one["path"]).as_posix(), one.get("md5"), True, self) for one in outs)
                    yield path.relative_to(self.root).as_posix(), files

    def stage(self, name: str) -> GraphStage:
        """One stage. Raises UserError where dvc.yaml has none of this name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise UserError(f"dvc.yaml: no stage named {name}")

    def makers(self) -> dict[str, tuple[str, File]]:
        """Path of each output and of the data of each .dvc file -> the stage or .dvc file that makes it, and itself."""
        made = {file.path: (source, file) for source, files in self.sources.items() for file in files}
        return made | {out.path: (stage.name, out) for stage in self.stages for out in stage.outs}

    def makers_of_params(self, name: str) -> set[str]:
        """The stages that make a file of parameters of this stage."""
        files = self.stage(name).params_of
        return {one.name for one in self.stages if any(out.path in files for out in one.outs)}

    def plan(self) -> list[tuple[str, list[str], list[str]]]:
        """(stage, the stages whose outputs it reads, the .dvc files that it reads), each after what it needs, in the
        order of `dvc repro`. Raises UserError for a circle."""
        makers = self.makers()
        above: dict[str, list[str]] = {}
        for stage in self.stages:
            read = [] if stage.frozen else [*(file.path for file in stage.inputs), *stage.params_of]
            found = []
            for path in read:
                found += [maker for out, (maker, _) in makers.items() if path == out or path.startswith(f"{out}/")]
                found += [maker for out, (maker, _) in makers.items() if out.startswith(f"{path}/")]
            above[stage.name] = list(dict.fromkeys(found))
        order: list[str] = []
        begun: list[str] = []

        def visit(name: str) -> None:
            if name in begun:
                raise _unreadable(GRAPH_FILE, f"the stages need each other in a circle: {' ← '.join([*begun, name])}")
            begun.append(name)
            for need in above.get(name, []):
                if need in above and need not in order:
                    visit(need)
            order.append(begun.pop())

        for name in above:
            if name not in order:
                visit(name)
        return [
            (name, [one for one in above[name] if one in above], [one for one in above[name] if one not in above])
            for name in order
        ]

    def hash_at(self, path: Path) -> str | None:
        """The hash of what is at `path` (absolute; a file or folder), every byte read; None where nothing is."""
        return self.hashes.of(path, read=True)

    def files_below(self, path: Path) -> list[str]:
        """The files in the hash of the folder at `path`, relative to it; [""] for a file."""
        return [""] if path.is_file() else self.hashes.files(path)

    @cached_property
    def cache(self) -> Path:
        """The folder of the objects in DVC's cache (`cache.dir` of DVC's configuration)."""
        return cache_folder(self.root)

    def blob(self, digest: str) -> Path:
        """Where the cache has the object with this hash."""
        return self.cache / digest[:2] / digest[2:]

    def cached(self, digest: str) -> list[tuple[str, Path]]:
        """(path inside, file in DVC's cache) of everything in the folder with this hash; ("", file) for the hash of a
        file. Empty where the cache does not hold the file, or the listing of the folder."""
        blob = self.blob(digest)
        if not blob.is_file():
            return []
        if not digest.endswith(".dir"):
            return [("", blob)]
        try:
            entries = json.loads(blob.read_bytes())
            return [(entry["relpath"], self.blob(entry["md5"])) for entry in entries]
        except (ValueError, TypeError, KeyError):
            return []

    def corrupt_outs(self, name: str | None = None) -> list[str]:
        """Outputs of a stage (None: of all) that are in the workspace with other bytes than dvc.lock names."""
        outs = [out for stage in self._selected(name) for out in stage.outs if out.recorded and out.exists]
        return [out.path for out in outs if out.content_hash() != out.recorded]

    def examine_cache(self, name: str | None = None) -> Cached:
        """Read every object of the cache that the outputs of a stage (None: of all) need, as far as it is there."""
        objects: set[Path] = set()
        for stage in self._selected(name):
            for digest in filter(None, (out.recorded for out in stage.outs)):
                objects.update(filter(Path.is_file, [self.blob(digest), *(blob for _, blob in self.cached(digest))]))
        corrupt = [path for path in sorted(objects) if md5_of(path) != name_of(path)]
        return Cached(len(objects), sum(path.stat().st_size for path in objects), corrupt)

    def _selected(self, name: str | None) -> Iterator[GraphStage]:
        return (stage for stage in self.stages if name in (None, stage.name))


@contextmanager
def open_project(root: Path) -> Iterator[Project]:
    """The project at `root` as its files are now. Raises UserError where one cannot be read.

    DVC rewrites dvc.lock in place, for a second or more: it is read under DVC's own lock.
    """
    root = root.absolute()
    with locked(root):
        project = Project(root)
    try:
        yield project
    finally:
        project.hashes.save()


@contextmanager
def locked(root: Path, writes: bool = False) -> Iterator[None]:
    """Hold DVC's lock of the project (.dvc/tmp/lock), as its writers do. A `dvc repro` releases it while its stage
    runs. Raises UserError when another process does not release it."""
    path = root / ".dvc" / "tmp" / "lock"
    if not path.exists():  # no DVC has written anything yet
        yield
        return
    deadline, waited = time.monotonic() + PATIENCE_SECONDS, False
    with path.open("rb") as file:
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_EX if writes else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{path}: another DVC process has held this lock for {PATIENCE_SECONDS:.0f} s; wait for its "
                        "end or stop it, then run again"
                    ) from None
            except OSError as error:  # a file system without locks
                raise UserError(f"{path}: cannot be locked ({error.strerror}); use another file system") from None
            if not waited:
                print("waiting for another DVC process to finish (.dvc/tmp/lock)", file=sys.stderr, flush=True)
                waited = True
            time.sleep(0.05)
        yield


def read_lock_file(root: Path) -> str | None:
    """The text of dvc.lock, never in the middle of a rewrite; None where there is none. Raises UserError."""
    with locked(root):
        path = root / LOCK_FILE
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


_ENTRY = re.compile(r"^  (?! )(?P<name>[^:\n]+):\n(?:    .*\n)*", re.MULTILINE)
"""One stage in dvc.lock."""


def recorded_order(root: Path) -> tuple[str, ...]:
    """The stages that dvc.lock names, in its order; none where there is no such file. Raises UserError."""
    text = read_lock_file(root)
    return tuple(match["name"] for match in _ENTRY.finditer(text or ""))


def restore_order(root: Path, stages: Iterable[str], before: Iterable[str]) -> None:
    """Write the entries of dvc.lock in the order of one `dvc repro`, in DVC's own bytes. Raises UserError.

    DVC keeps the place of an existing entry (`before`: the order when the run began), and appends new entries in the
    order of the graph (`stages`). Stages that run side by side are entered as they end.
    """
    path = root / LOCK_FILE
    with locked(root, writes=True):
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        entries = {match["name"]: match[0] for match in _ENTRY.finditer(text)}
        order = [name for name in dict.fromkeys((*before, *stages, *entries)) if name in entries]
        first = next(_ENTRY.finditer(text), None)
        if first is None or order == list(entries):
            return
        rest = text[first.start() + sum(map(len, entries.values())) :]
        with atomic(path) as place:
            place.write_text(text[: first.start()] + "".join(map(entries.__getitem__, order)) + rest, encoding="utf-8")
            place.chmod(path.stat().st_mode)


def cache_folder(root: Path) -> Path:
    """The folder of the objects in DVC's cache. Raises UserError where DVC's configuration cannot be read."""
    user = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    own = Path(os.environ.get("DVC_GLOBAL_CONFIG_DIR") or user / "dvc")
    system = Path(os.environ.get("DVC_SYSTEM_CONFIG_DIR") or "/etc/xdg/dvc")
    folder = root / ".dvc" / "cache"
    for path in (system / "config", own / "config", root / ".dvc" / "config", root / ".dvc" / "config.local"):
        parser = ConfigParser(interpolation=None, strict=False, default_section="no section")
        try:
            parser.read(path, encoding="utf-8")
        except (ConfigError, OSError, ValueError) as error:
            raise UserError(f"{path}: no configuration of DVC ({' '.join(str(error).split())})") from None
        if found := parser.get("cache", "dir", fallback="").strip("\"'"):
            folder = path.parent / Path(found).expanduser()
    return folder.resolve() / "files" / "md5"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (YAMLError, ValueError, OSError) as error:
        raise _unreadable(path.name, " ".join(str(error).split()).replace(f"{path.parent}{os.sep}", "")) from None
    if not isinstance(content, dict) and (content is not None or path.name == LOCK_FILE):
        raise _unreadable(path.name, "no mapping")
    return content or {}


def _unreadable(name: str, reason: str) -> UserError:
    if name == LOCK_FILE:
        return UserError(
            f"dvc.lock is broken ({reason}); `git checkout dvc.lock` brings back the committed one, and what DVC's "
            "cache has is not made again"
        )
    return UserError(f"{name}: {reason}")


def _pairs(entries: Any) -> list[tuple[str, Any]]:
    """(path, options) of a list in dvc.yaml, whose entries are paths or mappings of one path to its options."""
    found: list[tuple[str, Any]] = []
    for entry in entries or []:
        found += list(entry.items()) if isinstance(entry, dict) else [(str(entry), None)]
    return found


def _params(entries: Any) -> dict[str, tuple[str, ...] | None]:
    files: dict[str, tuple[str, ...] | None] = {}
    for entry in entries or []:
        for file, names in entry.items() if isinstance(entry, dict) else [(str(PARAMS_FILE), [entry])]:
            before = files.get(file, ())
            files[file] = None if not names or before is None else (*before, *map(str, names))
    return files


def _read_params(path: Path, name: str) -> dict[str, Any]:
    """A file of parameters. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            content = json.loads(text)
        elif path.suffix == ".toml":
            content = tomllib.loads(text)
        else:
            content = YAML(typ="safe").load(text)
    except (OSError, ValueError, YAMLError) as error:
        raise UserError(f"{name}: cannot be read ({' '.join(str(error).split())})") from None
    return dict(content or {})
