"""Why a stage is not up to date, from DVC's status of its command, parameters, inputs and outputs."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.graph import Graph, open_graph
from flows.text import dotted, shorten
from rlhf_core.errors import UserError

if TYPE_CHECKING:
    from tasks.stage.dvc_adapter import Changes, File
    from tasks.stage.dvc_adapter import Project as OpenProject

MOST_NAMES = 2
LONGEST_WHY = 100
FIRST_RUN = "not run here yet"
OUTPUT_STATES = {"deleted": "missing", "modified": "edited", "not in cache": "not in DVC's cache"}


class Project:
    """The graph of a project and the status of its stages, read from one open DVC repository."""

    def __init__(self, root: Path, project: "OpenProject", graph: Graph) -> None:
        self.root, self.graph = root, graph
        self._project = project
        self._lock = threading.Lock()

    def reasons(self, name: str) -> list[str]:
        """Why `dvc repro --single-item NAME` would not skip the stage now; empty when it is up to date.

        Files and params.yaml are read at each call; dvc.lock was read when the project was opened, and a stage's entry
        in it changes only when the stage runs.
        """
        with self._lock:
            changes = self._project.changes(name)
        if not name.endswith(".dvc") and not (changes.recorded and changes.made_here):
            return [FIRST_RUN]
        return list(_input_reasons(name, changes)) or list(_output_reasons(changes))

    def key(self, name: str) -> str | None:
        """The identity of the execution that would come now; None where an input or params.yaml is missing."""
        from tasks.params.loader import PARAMS_FILE, read_yaml
        from tasks.stage.definition import Definition

        definition = Definition(name, self._project)
        with self._lock, suppress(UserError):
            return definition.key(read_yaml(self.root / PARAMS_FILE), definition.hashes())
        return None

    def plan(self, graph: Graph) -> dict[str, list[str]]:
        """The stages of `graph` that may run: those not up to date now, with the reasons, and those below them."""
        plan: dict[str, list[str]] = {}
        for stage in graph.stages:
            if (why := self.reasons(stage)) or any(need in plan for need in graph.upstream[stage]):
                plan[stage] = why
        return plan

    def is_recorded(self, name: str) -> bool:
        """Whether dvc.lock has the stage's result for its present inputs; files may be missing here."""
        with self._lock:
            return self._project.is_recorded(name)

    def can_be_shared(self, name: str) -> bool:
        """Whether DVC's run cache can hold results of the stage."""
        return self._project.can_be_shared(name)

    def makers_of_params(self, name: str) -> set[str]:
        """The stages that make a file of parameters of the stage; without it nobody can say whether it changed."""
        return self._project.makers_of_params(name)

    def missing(self, name: str) -> tuple["File", ...]:
        """The outputs of a stage, or of a .dvc file, that are missing here or in DVC's cache."""
        with self._lock:
            return self._project.missing_outs(name)

    def changed_sources(self, graph: Graph) -> tuple[str, ...]:
        """The tracked data files of `graph` that were edited since DVC recorded them, or are missing."""
        return tuple(source for source in graph.all_sources() if self.reasons(source))


@contextmanager
def opened(root: Path) -> Iterator[Project]:
    """The project at `root`, closed at the end. Raises UserError when DVC cannot read it."""
    with open_graph(root) as (project, graph):
        yield Project(root, project, graph)


def _input_reasons(name: str, changes: "Changes") -> Iterator[str]:
    from tasks.stage.definition import is_code

    yield from _changed_params(changes.recorded_params, changes.present_params)
    if changes.command:
        yield "its .dvc file changed" if name.endswith(".dvc") else "the command changed"
    if changes.always_runs:
        yield "runs every time"
    if code := [path for path, state in changes.inputs.items() if state != "deleted" and is_code(path)]:
        yield f"code changed: {_first(code)}"
    if gone := [path for path, state in changes.inputs.items() if state == "deleted"]:
        yield f"{_first(gone)} missing"
    if data := [path for path, state in changes.inputs.items() if state != "deleted" and not is_code(path)]:
        yield f"{_first(data)} changed"


def _output_reasons(changes: "Changes") -> Iterator[str]:
    for state in dict.fromkeys(changes.outs.values()):
        paths = [path for path, found in changes.outs.items() if found == state]
        yield f"{_first(paths)} {OUTPUT_STATES.get(state, state)}"


def _changed_params(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """`ppo.kl.coef 0.05 → 0.2` for the first few values that are not the recorded ones."""
    from tasks.params.secrets import HIDDEN, is_secret

    old, new = dotted(before), dotted(now)
    changed = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    for name in changed:
        before_now = (HIDDEN, HIDDEN) if is_secret(name) else (_value(old, name), _value(new, name))
        yield f"{name} {' → '.join(before_now)}"


def _value(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "(unset)")
    return shorten(value if isinstance(value, str) else json.dumps(value, default=str))


def brief(reasons: Sequence[str]) -> str:
    """The first reasons and how many more there are, in one line of at most `LONGEST_WHY` characters."""
    more = f" and {len(reasons) - MOST_NAMES} more" if len(reasons) > MOST_NAMES else ""
    return shorten("; ".join(reasons[:MOST_NAMES]), LONGEST_WHY - len(more)) + more


def _first(names: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"
