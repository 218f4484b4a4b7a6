"""`leash clean`: shows what dead runs have left behind, and removes it when told to. What is a leftover:
`tasks/records/leftovers.py`; clones of `leash verify`: `flows/commands/verify/clone.py`."""

from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.verify.clone import KEPT, clones
from flows.terminal import table

if TYPE_CHECKING:
    from tasks.records.leftovers import Found, Leftover

UNITS = ("B", "kB", "MB", "GB")


def look(root: Path, everything: bool) -> "Found":
    """All that may go, and what stays, in words."""
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
    """Remove what was agreed on and is still nobody's; says what was done."""
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


def question(agreed: "list[Leftover]") -> str:
    """What to ask before removing."""
    return f"Remove {_count(agreed)}?"


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
