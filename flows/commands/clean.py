"""`leash clean`: lists what dead runs have left behind, clones of `leash verify` included, and removes it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flows.commands.verify.clone import KEPT, clones
from flows.terminal import table

if TYPE_CHECKING:
    from tasks.records.leftovers import Found, Leftover

UNITS = ("B", "kB", "MB", "GB")


def clean(root: Path, everything: bool, yes: bool) -> None:
    """Print what may go, and remove it with `yes` or after a yes at the terminal."""
    found = look(root, everything)
    print(render(root, found), flush=True)
    if not found.leftovers:
        return
    if yes or (sys.stdin.isatty() and typer.confirm(f"Remove {_count(found.leftovers)}?")):
        print(remove(root, found.leftovers, everything))
    else:
        print("nothing was removed; `leash clean --yes` removes what the table lists")


def look(root: Path, everything: bool) -> "Found":
    """What may go, and what stays and why."""
    from tasks.records.leftovers import find

    found = find(root, everything)
    for folder, pid in clones(root):
        if pid is not None:
            found.stays.append(
                f"{folder.relative_to(root)}: process {pid or '?'} works in this clone of `leash verify`"
            )
            continue
        kept = (folder / KEPT).exists()
        found.add(folder, f"a clone of `leash verify` {'that was kept' if kept else 'whose process died'}")
    return found


def remove(root: Path, agreed: "list[Leftover]", everything: bool) -> str:
    """Remove what was agreed on and is still unused; returns what was done."""
    from tasks.records.leftovers import remove as remove_all

    present = {leftover.path for leftover in look(root, everything).leftovers}
    gone = remove_all(root, [leftover for leftover in agreed if leftover.path in present], everything)
    kept = len(agreed) - len(gone)
    rest = f"; {kept} stay: they are in use now, or could not be removed" if kept else ""
    return f"removed {_count(gone)}{rest}"


def render(root: Path, found: "Found") -> str:
    """The table of what may go, then what stays."""
    rows = [(str(one.path.relative_to(root)), readable(one.size), one.why) for one in found.leftovers]
    lines = [table([("path", "size", "why"), *rows])] if rows else ["nothing is left behind"]
    lines += [f"stays: {text}" for text in [*found.stays, *_unsent(root)]]
    return "\n".join(lines)


def _unsent(root: Path) -> list[str]:
    from tasks.records.leftovers import unsent

    waiting = unsent(root)
    events = sum(number for _, number in waiting)
    return [f"work/outbox: {events} events wait for MLflow; `leash sync` sends them"] if waiting else []


def _count(leftovers: "list[Leftover]") -> str:
    return f"{len(leftovers)} things, {readable(sum(one.size for one in leftovers))}"


def readable(size: float) -> str:
    """Bytes with a unit, by thousands."""
    for unit in UNITS:
        if size < 1000 or unit == UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
