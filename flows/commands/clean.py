"""`leash clean`: lists and removes what dead runs have left behind, isolated workspaces included."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.filesize import decimal

from flows import workspace
from flows.text import table

if TYPE_CHECKING:
    from tasks.records.leftovers import Found, Leftover


def clean(root: Path, everything: bool, yes: bool) -> None:
    """Print what can be removed, and remove it with `yes` or after a yes at the terminal."""
    found = find_leftovers(root, everything)
    print(render(root, found), flush=True)
    if not found.leftovers:
        return
    if yes or (sys.stdin.isatty() and typer.confirm(f"Remove {_count(found.leftovers)}?")):
        print(remove(root, found.leftovers, everything))
    else:
        print("nothing was removed; `leash clean --yes` removes what the table lists")


def find_leftovers(root: Path, everything: bool) -> "Found":
    """What can be removed, and what stays and why."""
    from tasks.records.leftovers import find

    found = find(root, everything)
    for folder, pid in workspace.found(root):
        if pid is not None:
            found.stays.append(f"{folder.relative_to(root)}: process {pid or '?'} works in this workspace")
            continue
        why = workspace.why_kept(folder)
        found.add(folder, f"a workspace that was kept: {why}" if why else "a workspace whose process died")
    return found


def remove(root: Path, confirmed: "list[Leftover]", everything: bool) -> str:
    """Remove what was confirmed and is still unused; returns a line about it."""
    from tasks.records.leftovers import remove as remove_all

    present = {leftover.path for leftover in find_leftovers(root, everything).leftovers}
    gone = remove_all(root, [leftover for leftover in confirmed if leftover.path in present], everything)
    for leftover in gone:
        workspace.forget(root, leftover.path / workspace.TREE)
    kept = len(confirmed) - len(gone)
    rest = f"; {kept} stay: they are in use now, or could not be removed" if kept else ""
    return f"removed {_count(gone)}{rest}"


def render(root: Path, found: "Found") -> str:
    """The table of what can be removed, then what stays."""
    from tasks.records.leftovers import unsent

    rows = [(str(one.path.relative_to(root)), decimal(one.size), one.why) for one in found.leftovers]
    lines = [table([("path", "size", "why"), *rows])] if rows else ["nothing is left behind"]
    lines += [f"stays: {text}" for text in found.stays]
    if waiting := len(unsent(root)):
        lines.append(f"stays: work/tracking: {waiting} runs are not all in MLflow; `leash sync` sends them")
    return "\n".join(lines)


def _count(leftovers: "list[Leftover]") -> str:
    return f"{len(leftovers)} things, {decimal(sum(one.size for one in leftovers))}"
