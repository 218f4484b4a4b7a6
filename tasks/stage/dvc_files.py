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
from collections.abc import Iterable, Iterator, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pathspec import GitIgnoreSpec
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from tasks.params.loader import PARAMS_FILE, with_derived

GRAPH_FILE, LOCK_FILE, IGNORE_FILE = "dvc.yaml", "dvc.lock", ".dvcignore"
PATIENCE_SECONDS = 600.0
"""How long to wait for another DVC process that holds the lock of the project."""
HASHES = Path("work") / "hashes.json"
"""Path -> [size, time, inode, MD5] of the files read before."""
SETTLED_SECONDS = 0.1
"""A file changed less than this ago is not remembered: another change may leave its time as it is."""
NEVER_DATA = ("/.git", "/.hg", "/.dvc")
"""Ends of paths."""
TEMPLATES = ("foreach", "matrix", "wdir")
OUTS = ("outs", "metrics", "plots")


def digest(content: Any) -> str:
    """SHA-256 over the canonical JSON of `content`."""
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def md5_of(path: Path) -> str:
    """The MD5 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


class Hashes:
    """DVC's hashes of files and folders below `root`. A folder's is the MD5 of the JSON list of its files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        ignore = root / IGNORE_FILE
        rules = ignore.read_text(encoding="utf-8").splitlines() if ignore.is_file() else []
        self._ignored = GitIgnoreSpec.from_lines(rules)
        self._read: set[str] = set()
        """Paths whose bytes this object has read."""
        self._changed = False
        try:
            self._known = dict(json.loads((root / HASHES).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            self._known = {}

    def of(self, path: Path, read: bool = False) -> str | None:
        """The hash of the file or folder at `path` (absolute); None where nothing is. The hash of a file whose size,
        time and inode are unchanged is remembered; with `read` only that of one that this object has read. Raises
        UserError where a file cannot be read."""
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
        """Whether .dvcignore names a path in the project."""
        inside = path.removeprefix(f"{self.root}/")
        if inside == path:
            return False
        if path.endswith(NEVER_DATA) or (is_folder and os.path.isdir(f"{path}/.dvc")):  # noqa: PTH112 - faster
            return True
        return self._ignored.match_file(inside + "/" * is_folder)

    def save(self) -> None:
        """Remember what was read, for the next process. Where two write at the same time one wins: what is not
        remembered is read again."""
        if self._changed and (self.root / HASHES.parent).is_dir():
            present = {name: entry for name, entry in self._known.items() if os.path.exists(name)}  # noqa: PTH110
            fresh = self.root / HASHES.with_name(f".hashes.{os.getpid()}")
            with suppress(OSError):
                fresh.write_text(json.dumps(present), encoding="utf-8")
                fresh.replace(self.root / HASHES)
        self._changed = False

    def _of_file(self, path: Path, read: bool) -> str:
        name = str(path)
        try:
            now = path.stat()
            stamp = [now.st_size, now.st_mtime_ns, now.st_ino]
            entry = self._known.get(name)
            if entry and entry[:3] == stamp and (name in self._read or not read):
                return str(entry[3])
            md5 = md5_of(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        if time.time() - now.st_mtime > SETTLED_SECONDS:
            self._known[name], self._changed = [*stamp, md5], True
            self._read.add(name)
        return md5


@dataclass(frozen=True)
class File:
    """A file or folder that a stage reads or writes."""

    path: str
    """As dvc.yaml has it, or relative to the project for data of a .dvc file."""
    recorded: str | None
    """The hash in dvc.lock or in the .dvc file."""
    in_cache: bool
    """Whether it is an output that DVC's cache holds."""
    project: "Project"
    size: int = 0
    """Bytes, as dvc.lock has them."""

    @property
    def place(self) -> Path:
        """Where it is."""
        return self.project.root / self.path

    @property
    def exists(self) -> bool:
        """Whether it is in the workspace."""
        return self.place.exists()

    @property
    def is_cached(self) -> bool:
        """Whether DVC's cache holds the recorded content with every file of a folder; true for what it does not
        cache."""
        if not self.in_cache or not self.recorded:
            return not self.in_cache
        members = self.project.cached(self.recorded)
        return self.project.blob(self.recorded).is_file() and all(blob.is_file() for _, blob in members)

    def known_hash(self, read: bool = False) -> str:
        """The present hash. Bytes are read only where time, size or inode are new; with `read` once by this process.
        Raises UserError for a missing file."""
        md5 = self.project.hashes.of(self.place, read)
        if md5 is None:
            raise UserError(f"{self.path}: file not found")
        return md5


@dataclass(frozen=True)
class Definition:
    """A stage as dvc.yaml defines it, with its entry in dvc.lock."""

    name: str
    command: str
    inputs: tuple[File, ...]
    outs: tuple[File, ...]
    params_of: Mapping[str, tuple[str, ...]]
    """File of parameters -> the tracked names in it."""
    recorded_params: Mapping[str, Any]
    command_changed: bool
    """Whether dvc.lock has another command, or none."""
    is_recorded: bool
    """Whether dvc.lock has an entry at all."""
    always_runs: bool
    frozen: bool
    project: "Project"

    def hashes(self) -> dict[str, str]:
        """DVC's hash of every input. Raises UserError for a missing input."""
        for file in self.inputs:
            if not file.exists:
                raise UserError(f"{file.path}: file not found; `dvc repro {self.name}` makes what the stage needs")
        return {file.path: file.known_hash() for file in self.inputs}

    def require_intact(self, hashes: Mapping[str, str], recorded: bool) -> None:
        """Read every input. Raises UserError for one with other bytes than its hash although its time and size are
        unchanged, and where DVC will record the result (`recorded`) also for one with other bytes than its maker's
        entry in dvc.lock: DVC would record the result as made from the right bytes."""
        makers = self.project.makers() if recorded else {}
        for file in self.inputs:
            made = makers[file.path][1].recorded if file.path in makers else None
            if {file.known_hash(read=True)} != {hashes[file.path], made or hashes[file.path]}:
                raise UserError(
                    f"{file.path}: other bytes than DVC has noted (an edit, or a damaged disk or cache); `rm -r "
                    f"{file.path}` and run again, or keep an edit by `dvc commit`; `leash doctor` finds what else is "
                    "damaged"
                )

    def tracked(self, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters that the stage depends on, of the content of params.yaml. Raises UserError for a missing
        one."""
        known, found = with_derived(params), {}
        for name in sorted(name for names in self.params_of.values() for name in names):
            try:
                found[name] = _value(known, name)
            except (KeyError, TypeError):
                raise UserError(f"{PARAMS_FILE}: {name}: missing parameter; see docs/parameters.md") from None
        return found

    def blocks(self, params: dict[str, Any]) -> dict[str, Any]:
        """The whole blocks of params.yaml of which the stage depends on at least one key."""
        known = with_derived(params)
        return {name: known[name] for name in sorted({name.partition(".")[0] for name in self.tracked(params)})}

    def key(self, params: dict[str, Any], hashes: dict[str, str]) -> str:
        """The identity of this execution: hash of command, tracked parameters and contents of the dependencies."""
        return digest({"cmd": self.command, "params": self.tracked(params), "deps": hashes})

    def recorded_key(self) -> str | None:
        """The key of the execution in dvc.lock, if DVC's cache holds its outputs; else None."""
        hashes = {file.path: file.recorded for file in self.inputs}
        if self.command_changed or None in hashes.values() or not all(out.is_cached for out in self.outs):
            return None
        return digest({"cmd": self.command, "params": dict(self.recorded_params), "deps": hashes})

    def present_params(self) -> dict[str, Any]:
        """The tracked values as the files have them now, without those that are unset. Raises UserError where a file
        cannot be read."""
        found: dict[str, Any] = {}
        for file, names in self.params_of.items():
            content = read_file(self.project.root / file)
            for name in names:
                with suppress(KeyError, TypeError):
                    found[name] = _value(content, name)
        return found


def _value(content: Any, name: str) -> Any:
    """The value with a dotted name. Raises KeyError or TypeError where it is unset."""
    for part in name.split("."):
        content = content[part]
    return content


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
        if md5_of(target) != name_of(self.path):
            target.unlink()
            self.check()
            raise UserError(f"{target}: the disk has other bytes than {self.path}, of which it is a copy")

    def check(self) -> None:
        """Raise UserError where the bytes are not those of the hash."""
        if md5_of(self.path) != name_of(self.path):
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
        stages, records = ((read_file(root / name).get("stages") or {}) for name in (GRAPH_FILE, LOCK_FILE))
        for name, found in ((GRAPH_FILE, stages), (LOCK_FILE, records)):
            if not isinstance(found, dict):
                raise _unreadable(name, "`stages` is no mapping")
        self.stages = tuple(self._stage(name, entry, records.get(name) or {}) for name, entry in stages.items())
        """In the order of dvc.yaml."""
        self.sources: dict[str, tuple[File, ...]] = dict(self._dvc_files())
        """.dvc file -> its data."""
        self.tracked = tuple(file for files in self.sources.values() for file in files)
        """Data of .dvc files."""

    def _stage(self, name: str, entry: Any, record: Any) -> Definition:
        entry = entry if isinstance(entry, dict) else {}
        if used := [key for key in TEMPLATES if key in entry]:
            raise _unreadable(GRAPH_FILE, f"stage {name} uses `{used[0]}`, which `leash` does not; write it out")
        if not entry.get("cmd"):
            raise _unreadable(GRAPH_FILE, f"stage {name} has no cmd")
        params_of: dict[str, tuple[str, ...]] = {}
        for one in entry.get("params") or []:
            for file, names in one.items() if isinstance(one, dict) else [(str(PARAMS_FILE), [one])]:
                if not names:
                    raise _unreadable(GRAPH_FILE, f"stage {name} has all of {file} among its params; name the keys")
                params_of[file] = (*params_of.get(file, ()), *map(str, names))
        try:
            entries = {one["path"]: one for part in ("deps", "outs") for one in record.get(part, [])}
            values: dict[str, Any] = {}
            for file, names in params_of.items():
                found = (record.get("params") or {}).get(file) or {}
                values |= {one: found[one] for one in names if one in found}
        except (AttributeError, TypeError, KeyError):
            raise _unreadable(LOCK_FILE, f"the entry of {name}") from None

        def with_record(path: str, in_cache: bool) -> File:
            known = entries.get(path, {})
            return File(path, known.get("md5"), in_cache, self, int(known.get("size") or 0))

        pairs = [pair for kind in OUTS for pair in _pairs(entry.get(kind))]
        outs = tuple(with_record(path, (options or {}).get("cache", True)) for path, options in pairs)
        return Definition(
            name=name,
            command=str(entry["cmd"]),
            inputs=tuple(with_record(path, False) for path, _ in _pairs(entry.get("deps"))),
            outs=outs,
            params_of=params_of,
            recorded_params=values,
            command_changed=record.get("cmd") != entry["cmd"],
            is_recorded=bool(record),
            always_runs=bool(entry.get("always_changed")) or not (entry.get("deps") or params_of or outs),
            frozen=bool(entry.get("frozen")),
            project=self,
        )

    def _dvc_files(self) -> Iterator[tuple[str, tuple[File, ...]]]:
        made = {str(self.root / out.path) for stage in self.stages for out in stage.outs}
        for here, folders, names in os.walk(self.root):
            inside = [name for name in sorted(folders) if f"{here}/{name}" not in made]
            folders[:] = [name for name in inside if not self.hashes.is_ignored(f"{here}/{name}", True)]
            if IGNORE_FILE in names and here != str(self.root):
                raise UserError(f"{here}/{IGNORE_FILE}: only that of the project is read; move its lines there")
            for name in sorted(names):
                if name.endswith(".dvc") and not self.hashes.is_ignored(f"{here}/{name}", False):
                    path = Path(here, name).relative_to(self.root)
                    outs = read_file(self.root / path).get("outs") or []
                    yield (
                        path.as_posix(),
                        tuple(File((path.parent / one["path"]).as_posix(), one.get("md5"), True, self) for one in outs),
                    )

    def stage(self, name: str) -> Definition:
        """One stage. Raises UserError where dvc.yaml has none of this name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise UserError(f"{GRAPH_FILE}: no stage named {name}")

    def makers(self) -> dict[str, tuple[str, File]]:
        """Path of each output and of the data of each .dvc file -> the stage or .dvc file that makes it, and itself."""
        made = {file.path: (source, file) for source, files in self.sources.items() for file in files}
        return made | {out.path: (stage.name, out) for stage in self.stages for out in stage.outs}

    def plan(self) -> list[tuple[str, list[str], list[str]]]:
        """(stage, the stages whose outputs it reads, the .dvc files that it reads), each after what it needs, in the
        order of `dvc repro`. Raises UserError for a circle."""
        made = [(out, maker) for out, (maker, _) in self.makers().items()]
        above: dict[str, list[str]] = {}
        for stage in self.stages:
            read = [] if stage.frozen else [*(file.path for file in stage.inputs), *stage.params_of]
            pairs = [(f"{path}/", f"{out}/", maker) for path in read for out, maker in made]
            found = [maker for path, out, maker in pairs if path.startswith(out) or out.startswith(path)]
            above[stage.name] = list(dict.fromkeys(found))
        order: list[str] = []

        def visit(name: str, below: tuple[str, ...]) -> None:
            if name in below:
                circle = " ← ".join([*below, name])
                raise _unreadable(GRAPH_FILE, f"the stages need each other in a circle: {circle}")
            for need in above[name]:
                if need in above and need not in order:
                    visit(need, (*below, name))
            order.append(name)

        for name in above:
            if name not in order:
                visit(name, ())
        return [
            (name, [one for one in above[name] if one in above], [one for one in above[name] if one not in above])
            for name in order
        ]

    def hash_at(self, path: Path) -> str | None:
        """The hash of what is at `path` (absolute; a file or folder), every byte read; None where nothing is."""
        return self.hashes.of(path, read=True)

    @cached_property
    def cache(self) -> Path:
        """The folder of the objects in DVC's cache (`cache.dir` of DVC's configuration)."""
        return cache_folder(self.root)

    def blob(self, md5: str) -> Path:
        """Where the cache has the object with this hash."""
        return self.cache / md5[:2] / md5[2:]

    def cached(self, md5: str) -> list[tuple[str, Path]]:
        """(path inside, file in DVC's cache) of everything in the folder with this hash; ("", file) for the hash of a
        file. Empty where the cache does not hold the file, or the listing of the folder."""
        blob = self.blob(md5)
        if not blob.is_file():
            return []
        if not md5.endswith(".dir"):
            return [("", blob)]
        try:
            return [(entry["relpath"], self.blob(entry["md5"])) for entry in json.loads(blob.read_bytes())]
        except (ValueError, TypeError, KeyError):
            return []

    def corrupt_outs(self, name: str | None = None) -> list[str]:
        """Outputs of a stage (None: of all) that are in the workspace with other bytes than dvc.lock names."""
        outs = [out for out in self._recorded_outs(name) if out.exists]
        return [out.path for out in outs if out.known_hash(read=True) != out.recorded]

    def examine_cache(self, name: str | None = None) -> Cached:
        """Read every object of the cache that the outputs of a stage (None: of all) need, as far as it is there."""
        objects: set[Path] = set()
        for md5 in (str(out.recorded) for out in self._recorded_outs(name)):
            objects.update(filter(Path.is_file, [self.blob(md5), *(blob for _, blob in self.cached(md5))]))
        corrupt = [path for path in sorted(objects) if md5_of(path) != name_of(path)]
        return Cached(len(objects), sum(path.stat().st_size for path in objects), corrupt)

    def _recorded_outs(self, name: str | None) -> list[File]:
        return [out for stage in self.stages if name in (None, stage.name) for out in stage.outs if out.recorded]


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
    begin, waits = time.monotonic(), False
    with path.open("rb") as file:
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_EX if writes else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > begin + PATIENCE_SECONDS:
                    raise UserError(
                        f"{path}: another DVC process has held this lock for {PATIENCE_SECONDS:.0f} s; wait for its "
                        "end or stop it, then run again"
                    ) from None
            except OSError as error:  # a file system without locks
                raise UserError(f"{path}: cannot be locked ({error.strerror}); use another file system") from None
            if not waits:
                print("waiting for another DVC process to finish (.dvc/tmp/lock)", file=sys.stderr, flush=True)
            waits = True
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
    return tuple(match["name"] for match in _ENTRY.finditer(read_lock_file(root) or ""))


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
        if order == list(entries):
            return
        head, rest = text.split("".join(entries.values()))
        with atomic(path) as place:
            place.write_text(head + "".join(entries[name] for name in order) + rest, encoding="utf-8")
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


def read_file(path: Path) -> dict[str, Any]:
    """A file of DVC's or of parameters, YAML or JSON; empty where it is missing. Raises UserError."""
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
    pairs = [entry.items() if isinstance(entry, dict) else [(str(entry), None)] for entry in entries or []]
    return [pair for some in pairs for pair in some]
