"""Why a stage is not up to date: DVC's status of its command, parameters, inputs and outputs, in words."""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.graph import Graph, open_repo

LONGEST_VALUE = 40
MOST_NAMES = 3
FIRST_RUN = "no earlier run"
OUTPUT_WORDS = {"deleted": "missing", "modified": "edited", "not in cache": "not in DVC's cache"}


class Project:
    """The graph of a project and the status of its stages, read from one open DVC repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._repo, self.graph = open_repo(root)
        self._lock = threading.Lock()

    def close(self) -> None:
        self._repo.close()

    def reasons(self, name: str) -> list[str]:
        """Why `dvc repro --single-item NAME` would not skip the stage now; empty when it is up to date.

        Files and params.yaml are read at each call; dvc.lock was read when the project was opened, and a stage's entry
        in it changes only when the stage runs.
        """
        from tasks.stage.contents import address

        with self._lock:
            (stage,) = [one for one in self._repo.index.stages if address(one, self.root) == name]
            return list(_input_reasons(stage)) or list(_output_reasons(stage))

    def plan(self, graph: Graph) -> dict[str, list[str]]:
        """The stages of `graph` that may run: those not up to date now, with the reasons, and those below them."""
        plan: dict[str, list[str]] = {}
        for stage in graph.stages:
            if (why := self.reasons(stage)) or any(need in plan for need in graph.upstream[stage]):
                plan[stage] = why
        return plan

    def changed_sources(self, graph: Graph) -> tuple[str, ...]:
        """The tracked data files of `graph` that were edited since DVC recorded them, or are missing."""
        return tuple(source for source in graph.all_sources() if self.reasons(source))


@contextmanager
def opened(root: Path) -> Iterator[Project]:
    """The project at `root`, closed at the end. Raises UserError when DVC cannot read it."""
    project = Project(root)
    try:
        yield project
    finally:
        project.close()


def _input_reasons(stage: Any) -> Iterator[str]:
    from dvc.dependency.param import ParamsDependency

    from tasks.stage.definition import is_code

    if stage.cmd and not any(one.hash_info for one in (*stage.deps, *stage.outs)):
        yield FIRST_RUN
        return
    deps = [] if stage.frozen else stage.deps
    for dep in deps:
        if isinstance(dep, ParamsDependency):
            yield from _changed_params(dep)
    if stage.changed_stage():
        yield "the command changed" if stage.cmd else "its .dvc file changed"
    if not stage.frozen and (stage.is_callback or stage.always_changed):
        yield "runs every time"
    inputs = [dep for dep in deps if not isinstance(dep, ParamsDependency)]
    changed = {dep.def_path: next(iter(status.values())) for dep in inputs if (status := dep.status())}
    if code := [path for path, state in changed.items() if state != "deleted" and is_code(path)]:
        yield f"code changed: {_first(code)}"
    if gone := [path for path, state in changed.items() if state == "deleted"]:
        yield f"{_first(gone)} missing"
    if data := [path for path, state in changed.items() if state != "deleted" and not is_code(path)]:
        yield f"{_first(data)} changed"


def _output_reasons(stage: Any) -> Iterator[str]:
    outs = {out.def_path: next(iter(status.values())) for out in stage.outs if (status := out.status())}
    for state in dict.fromkeys(outs.values()):
        yield f"{_first(path for path in outs if outs[path] == state)} {OUTPUT_WORDS.get(state, state)}"


def _changed_params(dep: Any) -> Iterator[str]:
    """`ppo.kl.coef 0.05 → 0.2` for the first few values that are not the recorded ones."""
    from tasks.params.secrets import HIDDEN, is_secret

    names: Any = next(iter(dep.status().values()), {})
    if not isinstance(names, Mapping):
        yield f"{dep.def_path} {'is missing' if names == 'deleted' else 'changed'}"
        return
    before, now = dep.hash_info.value or {}, dep.read_params()
    old = _flat({name: before[name] for name in names if name in before})
    new = _flat({name: now[name] for name in names if name in now})
    changed = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    shown = {name: (HIDDEN, HIDDEN) if is_secret(name) else (_value(old, name), _value(new, name)) for name in changed}
    if shown:
        yield _first((f"{name} {' → '.join(values)}" for name, values in shown.items()), between="; ")


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def _value(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "(unset)")
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _first(names: Iterable[str], between: str = ", ") -> str:
    """The first few, and how many more."""
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
    return f"{between.join(listed[:MOST_NAMES])}{more}"
