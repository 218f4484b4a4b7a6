"""`leash lineage`: a tree of artifacts, each with its hash, the stage and parameters that made it, and whether the
workspace still has it."""

import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.text import dotted, shorten

if TYPE_CHECKING:
    from tasks.records.lineage import Node

DIGITS = 8
NARROWEST = 60


def show(root: Path, path: Path) -> tuple[dict[str, Any], str]:
    """(for `--json`, for a terminal). Raises UserError."""
    from tasks.records.lineage import lineage

    tree = lineage(root, path)
    width = max(NARROWEST, shutil.get_terminal_size((120, 24)).columns)
    return tree.as_dict(), "\n".join(_lines(tree, "", "", width, set()))


def _lines(node: "Node", first: str, rest: str, width: int, seen: set[str]) -> Iterator[str]:
    """`first` is the prefix of the node's own line, `rest` that of every line below it. An execution that made several
    artifacts is shown once."""
    run = _run(node)
    shown = run in seen
    maker = f"  made by {node.record.stage}{' (see above)' if shown else ''}" if node.record else ""
    yield f"{first}{node.path}  {node.digest[:DIGITS]}  {node.state}{maker}"
    bar = f"{rest}│ " if node.inputs and not shown else f"{rest}  "
    for line in (*(() if shown else _about(node)), *node.notes):
        yield from textwrap.wrap(line, width, initial_indent=bar, subsequent_indent=f"{bar}  ", break_on_hyphens=False)
    if shown:
        return
    if run:
        seen.add(run)
    for position, child in enumerate(node.inputs, start=1):
        last = position == len(node.inputs)
        branch, below = ("└─ ", "   ") if last else ("├─ ", "│  ")
        yield from _lines(child, rest + branch, rest + below, width, seen)


def _run(node: "Node") -> str:
    """The identity of the execution that made the node; empty where no stage made it."""
    record = node.record
    return repr((record.stage, record.inputs, record.code, record.params)) if record else ""


def _about(node: "Node") -> Iterator[str]:
    if node.record:
        yield f"recorded in {node.record.source}"
        params = {name: value for name, value in dotted(node.record.params).items() if value not in (None, [], "")}
        yield " ".join(f"{name}={shorten(str(value).replace(' ', ''))}" for name, value in sorted(params.items()))
    if node.code_changed:
        count = len(node.code_changed)
        yield f"its code has changed since: {', '.join(node.code_changed[:3])}{f' and {count - 3} more' * (count > 3)}"
