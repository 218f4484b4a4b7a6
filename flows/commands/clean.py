"""`leash gc --work`: lists and removes what dead runs have left behind: state in `work/`, half-written outputs,
isolated workspaces. What MLflow has not received stays."""

import re
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import typer
from rich.filesize import decimal

from flows import workspace
from flows.text import table
from rlhf_core.errors import UserError
from rlhf_core.files import partial_path
from rlhf_core.files import remove as remove_path
from rlhf_core.locks import FileLock, holder, is_held
from tasks.params.loader import PARAMS_FILE, read_yaml
from tasks.stage.dvc_files import open_project
from tasks.stage.state import FINISHED, lock_file
from tasks.tracking import record, settings

KEY = re.compile(r"[0-9a-f]{16}")
"""Name of a state folder: the start of the stage's key."""


@dataclass(frozen=True)
class Leftover:
    """A file or folder that no run needs, and the reason; `stage` is empty for workspaces."""

    path: Path
    why: str
    stage: str = ""

    @property
    def size(self) -> int:
        """Bytes of the file, or of all files below the folder."""
        below = self.path.is_dir() and not self.path.is_symlink()
        return sum(one.lstat().st_size for one in (self.path.rglob("*") if below else [self.path]) if one.is_file())


@dataclass
class Found:
    """Leftovers that can be removed, and messages on those that cannot."""

    leftovers: list[Leftover] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)


def clean(root: Path, everything: bool, yes: bool) -> None:
    """Print what can be removed, and remove it with `yes` or after a yes at the terminal; `everything`: also state from
    which a stage would continue."""
    found = find_leftovers(root, everything)
    print(render(root, found), flush=True)
    if not found.leftovers:
        return
    if yes or (sys.stdin.isatty() and typer.confirm(f"Remove {_count(found.leftovers)}?")):
        print(remove(root, found.leftovers, everything))
    else:
        print("nothing was removed; `leash gc --work --yes` removes what the table lists")


def find_leftovers(root: Path, everything: bool, locked: Collection[str] = ()) -> Found:
    """What can be removed, and what stays and why. This process holds the locks of the stages `locked`."""
    found = Found()
    states: dict[str, list[Path]] = {}
    for path in sorted((root / "work").glob("*/*")):
        if path.is_dir() and KEY.fullmatch(path.name):
            states.setdefault(path.parent.name, []).append(path)
    with open_project(root) as project:
        outs = {stage.name: [out.place for out in stage.outs] for stage in project.stages}
        for name in dict.fromkeys([*outs, *states]):
            lock = lock_file(root, name)
            if name not in locked and is_held(lock):
                found.stays.append(f"{name}: process {holder(lock) or '?'} runs this stage; nothing of it is touched")
                continue
            key, recorded, doubt = "", "", ""
            if name in outs and name in states:
                definition = project.stage(name)
                recorded = (definition.recorded_key() or "")[:16]
                try:
                    key = definition.key(read_yaml(root / PARAMS_FILE), definition.hashes())[:16]
                except UserError as error:
                    doubt = " ".join(str(error).split())
            for folder in states.get(name, ()):
                if name not in outs:
                    why = f"dvc.yaml has no stage {name}"
                elif folder.name == recorded and (folder / FINISHED).exists():
                    why = "state of a finished stage"
                elif key and folder.name != key:
                    why = "state of other parameters, code or data"
                elif everything:
                    why = "state from which the stage would continue (--all)"
                else:
                    why = (
                        f"whether it is needed is not known ({doubt})" if doubt else "the stage would continue from it"
                    )
                    found.stays.append(f"{folder.relative_to(root)}: {why}; --all removes it")
                    continue
                found.leftovers.append(Leftover(folder, why, name))
            for partial in (partial_path(out) for out in outs.get(name, ())):
                if partial.exists():
                    found.leftovers.append(Leftover(partial, "half-written by a run that was stopped", name))
            if name not in outs and lock.is_file():
                found.leftovers.append(Leftover(lock, "a lock that no process holds", name))
    for folder, pid in workspace.found(root):
        why = workspace.why_kept(folder)
        if pid is not None:
            found.stays.append(f"{folder.relative_to(root)}: process {pid or '?'} works in this workspace")
        else:
            text = f"a workspace that was kept: {why}" if why else "a workspace whose process died"
            found.leftovers.append(Leftover(folder, text))
    return found


def remove(root: Path, agreed: Sequence[Leftover], everything: bool) -> str:
    """Remove what was agreed and is still unused, under the locks of the stages, so that none begins meanwhile; returns
    a line about it."""
    (root / "work").mkdir(exist_ok=True)
    locks = {one.stage: FileLock(lock_file(root, one.stage)) for one in agreed if one.stage}
    held = {stage: lock for stage, lock in locks.items() if lock.acquire()}
    try:
        unused = {one.path for one in find_leftovers(root, everything, held).leftovers}
        size = {one.path: one.size for one in agreed if one.path in unused}
        gone = [one for one in agreed if one.path in unused and _delete(root, one)]
    finally:
        for lock in held.values():
            lock.release()
    kept = len(agreed) - len(gone)
    rest = f"; {kept} stay: they are in use now, or could not be removed" if kept else ""
    return f"removed {len(gone)} things, {decimal(sum(size[one.path] for one in gone))}{rest}"


def _delete(root: Path, one: Leftover) -> bool:
    """Remove it, and its empty folder or git's entry; True if it no longer exists."""
    with suppress(OSError):
        remove_path(one.path)
        if one.stage:
            (root / "work" / one.stage).rmdir()
    if not one.stage:
        workspace.forget(root, one.path / workspace.TREE)
    return not one.path.exists()


def render(root: Path, found: Found) -> str:
    """The table of what can be removed, then what stays."""
    rows = [(str(one.path.relative_to(root)), decimal(one.size), one.why) for one in found.leftovers]
    lines = [table([("path", "size", "why"), *rows])] if rows else ["nothing is left behind"]
    lines += [f"stays: {text}" for text in found.stays]
    if waiting := len(record.pending(root, settings.uri_mark(settings.tracking_uri(root)))):
        lines.append(f"stays: work/tracking: {waiting} runs are not all in MLflow; `leash run --sync` sends them")
    return "\n".join(lines)


def _count(leftovers: Sequence[Leftover]) -> str:
    return f"{len(leftovers)} things, {decimal(sum(one.size for one in leftovers))}"
