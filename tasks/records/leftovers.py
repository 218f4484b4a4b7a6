"""Finds and removes leftovers of dead runs in `work/` and beside outputs, under the stage's lock. Unsent events are
never removed."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.errors import UserError
from rlhf_core.files import partial_path
from rlhf_core.files import remove as remove_path
from rlhf_core.locks import FileLock, holder, is_held
from tasks.params.loader import PARAMS_FILE, read_yaml
from tasks.stage.dvc_files import Definition, Project, open_project
from tasks.stage.state import FINISHED, lock_file
from tasks.tracking import record, settings

KEY = re.compile(r"[0-9a-f]{16}")
"""Name of a state folder: the start of the stage's key."""
OTHER_KEY = "state of other parameters, code or data"
RECORDED = "state of a finished stage"
THIS_KEY = "state from which the stage would continue (--all)"


@dataclass(frozen=True)
class Leftover:
    """A file or folder that no run needs, with its bytes and the reason; `stage` is empty for workspaces."""

    path: Path
    size: int
    why: str
    stage: str = ""


@dataclass
class Found:
    """Leftovers that can be removed, and messages on those that cannot."""

    leftovers: list[Leftover] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)

    def add(self, path: Path, why: str, stage: str = "") -> None:
        """Add a leftover."""
        self.leftovers.append(Leftover(path, size_of(path), why, stage))


def find(root: Path, everything: bool = False) -> Found:
    """All leftovers of the project at `root`; with `everything` also state from which a stage would continue."""
    found = Found()
    with open_project(root) as project:
        known = {stage.name: stage for stage in project.stages}
        for name in dict.fromkeys([*known, *_folders(root)]):
            _of_stage(project, name, known.get(name), everything, found)
    return found


def remove(root: Path, agreed: list[Leftover], everything: bool = False) -> list[Leftover]:
    """Remove leftovers, each under its stage's lock and only if it still is one; returns those removed."""
    gone: list[Leftover] = []
    for stage in dict.fromkeys(leftover.stage for leftover in agreed):
        mine = [leftover for leftover in agreed if leftover.stage == stage]
        gone += _remove_of_stage(root, stage, mine, everything) if stage else [one for one in mine if _delete(one.path)]
    return gone


def unsent(root: Path) -> list[Path]:
    """Every record of a pipeline run that is not in MLflow."""
    return record.pending(root, settings.uri_mark(settings.tracking_uri(root)))


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    files = [path] if not path.is_dir() or path.is_symlink() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.lstat().st_size for file in files)


def _folders(root: Path) -> Iterator[str]:
    """Names of folders in work/ that contain state folders."""
    for folder in sorted((root / "work").glob("*")):
        if folder.is_dir() and any(KEY.fullmatch(child.name) for child in folder.iterdir()):
            yield folder.name


def _of_stage(
    project: Project, name: str, stage: Definition | None, everything: bool, found: Found, mine: bool = False
) -> None:
    """Find the leftovers of one stage. `stage` is None if not in dvc.yaml; `mine`: this process holds its lock."""
    root = project.root
    lock = lock_file(root, name)
    if not mine and is_held(lock):
        found.stays.append(f"{name}: process {holder(lock) or '?'} runs this stage; nothing of it is touched")
        return
    _states(project, name, stage is not None, everything, found)
    for out in stage.outs if stage is not None else []:
        partial = partial_path(root / out.path)
        if partial.exists():
            found.add(partial, "half-written by a run that was stopped", name)
    if stage is None and lock.is_file():
        found.add(lock, "a lock that no process holds", name)


def _states(project: Project, name: str, exists: bool, everything: bool, found: Found) -> None:
    root = project.root
    folders = [path for path in sorted((root / "work" / name).glob("*")) if path.is_dir() and KEY.fullmatch(path.name)]
    if not folders:
        return
    key, doubt = _present_key(project, name) if exists else ("", "")
    recorded = (project.stage(name).recorded_key() or "")[:16] if exists else ""
    for folder in folders:
        if not exists:
            found.add(folder, f"dvc.yaml has no stage {name}", name)
        elif folder.name == recorded and (folder / FINISHED).exists():
            found.add(folder, RECORDED, name)
        elif everything or (key and folder.name != key):
            found.add(folder, THIS_KEY if folder.name == key or not key else OTHER_KEY, name)
        else:
            why = f"whether it is needed is not known ({doubt})" if doubt else "the stage would continue from it"
            found.stays.append(f"{folder.relative_to(root)}: {why}; --all removes it")


def _present_key(project: Project, name: str) -> tuple[str, str]:
    """(name of the present state folder, "") or ("", why it is unknown)."""
    try:
        definition = project.stage(name)
        return definition.key(read_yaml(project.root / PARAMS_FILE), definition.hashes())[:16], ""
    except UserError as error:
        return "", " ".join(str(error).split())


def _remove_of_stage(root: Path, stage: str, agreed: list[Leftover], everything: bool) -> list[Leftover]:
    """Remove under the stage's lock, so that the stage cannot start meanwhile. The lock file is removed only if the
    stage is not in dvc.yaml."""
    place = lock_file(root, stage)
    place.parent.mkdir(exist_ok=True)
    lock = FileLock(place)
    if not lock.acquire():
        return []
    try:
        now = Found()
        with open_project(root) as project:
            known = {one.name: one for one in project.stages}
            _of_stage(project, stage, known.get(stage), everything, now, mine=True)
        still = {leftover.path for leftover in now.leftovers}
        gone = [leftover for leftover in agreed if leftover.path in still and _delete(leftover.path)]
        with suppress(OSError):
            (root / "work" / stage).rmdir()  # if empty
        if stage not in known:
            place.unlink(missing_ok=True)
        return gone
    finally:
        lock.release()


def _delete(path: Path) -> bool:
    """Remove a path; True if it no longer exists."""
    with suppress(OSError):
        remove_path(path)
    return not path.exists()
