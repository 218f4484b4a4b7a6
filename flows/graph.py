"""The graph of stages that dvc.yaml defines, in the order of `dvc repro`, and why a stage is not up to date."""

import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.text import dotted, shorten
from rlhf_core.errors import UserError, did_you_mean
from tasks.params.loader import PARAMS_FILE, read_yaml
from tasks.params.secrets import HIDDEN, is_secret
from tasks.stage import dvc_files
from tasks.stage.definition import is_code
from tasks.stage.dvc_files import File, open_project

MOST_NAMES = 2
LONGEST_WHY = 100
FIRST_RUN = "not run here yet"
MISSING, EDITED, NOT_CACHED = "missing", "edited", "not in DVC's cache"
"""States of an output."""
UNCHANGED, RESTORES, RUNS = "up to date", "to restore from DVC's cache", "to run"
MAY_RUN = "to run if its inputs change"
"""What a run will do with a stage. A stage to run is restored where DVC's run cache has a result of its new inputs."""


@dataclass(frozen=True)
class Graph:
    """The stages, each after everything it needs."""

    stages: tuple[str, ...]
    upstream: dict[str, tuple[str, ...]]
    """Stage -> the stages whose outputs it reads."""
    sources: dict[str, tuple[str, ...]]
    """Stage -> the tracked data files (`*.dvc`, no command) that it reads."""

    def select(self, names: Iterable[str] | None) -> "Graph":
        """These stages and what they need, as `dvc repro STAGE…` chooses; all of them for none.

        Raises UserError on an unknown name, listing those there are.
        """
        wanted = list(names or self.stages)
        unknown = [name for name in wanted if name not in self.upstream]
        if unknown:
            listed = ", ".join(f"{name}{did_you_mean(name, self.stages)}" for name in unknown)
            raise UserError(f"unknown stage {listed}; dvc.yaml has: {', '.join(self.stages)}")
        needed: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name not in needed:
                needed.add(name)
                wanted.extend(self.upstream[name])
        return Graph(
            tuple(name for name in self.stages if name in needed),
            {name: self.upstream[name] for name in self.stages if name in needed},
            {name: self.sources[name] for name in self.stages if name in needed},
        )

    def all_sources(self) -> tuple[str, ...]:
        """The tracked data files that any of the stages reads, each once."""
        return tuple(dict.fromkeys(source for name in self.stages for source in self.sources[name]))


class Project:
    """The graph of a project and the status of its stages."""

    def __init__(self, files: dvc_files.Project) -> None:
        self.root = files.root
        plan = files.plan()
        upstream = {name: tuple(stages) for name, stages, _ in plan}
        self.graph = Graph(tuple(upstream), upstream, {name: tuple(sources) for name, _, sources in plan})
        self._files = files
        self._makers = files.makers()
        self._lock = threading.Lock()

    def reasons(self, name: str, allow_missing: bool = False, planned: Collection[str] = ()) -> list[str]:
        """Why `dvc repro --single-item NAME` would not skip the stage (or .dvc file) now; empty when it is up to date.
        With `allow_missing` as with DVC's option: what dvc.lock has for the present inputs may be missing here. Inputs
        that the stages `planned` make are not looked at: they may be made again.

        Files and params.yaml are read at each call; dvc.lock was read when the project was opened, and a stage's entry
        in it changes only when the stage runs.
        """
        with self._lock:
            if name in self._files.sources:
                found = {file.path: self._output_state(file) for file in self._files.sources[name]}
                return [] if allow_missing and EDITED not in found.values() else _with_states(found)
            stage = self._files.stage(name)
            cached = [out for out in stage.outs if out.in_cache] or list(stage.outs)
            here = not cached or any(out.exists or (out.in_cache and out.recorded and out.is_cached) for out in cached)
            if not stage.is_recorded or not (here or allow_missing):
                return [FIRST_RUN]
            if why := list(self._input_reasons(stage, allow_missing, planned)):
                return why
            states = {out.path: self._output_state(out) for out in stage.outs}
            return [] if allow_missing and EDITED not in states.values() else _with_states(states)

    def _input_reasons(
        self, stage: dvc_files.Definition, allow_missing: bool, planned: Collection[str]
    ) -> Iterator[str]:
        if not stage.frozen:
            absent = [file for file in stage.params_of if not (self.root / file).is_file()]
            if absent and not (allow_missing and all(file in self._makers for file in absent)):
                yield f"{_first(absent)} missing"
            if not absent:
                old, new = dotted(stage.recorded_params), dotted(stage.present_params())
                for name in dict.fromkeys((*old, *new)):
                    if old.get(name) != new.get(name) or (name in old) != (name in new):
                        shown = (HIDDEN, HIDDEN) if is_secret(name) else (_value(old, name), _value(new, name))
                        yield f"{name} {' → '.join(shown)}"
        if stage.command_changed:
            yield "the command changed"
        if stage.frozen:
            return
        if stage.always_runs:
            yield "runs every time"
        looked_at = [file for file in stage.inputs if self._makers.get(file.path, ("",))[0] not in planned]
        present = {file: file.known_hash() if file.exists else None for file in looked_at}
        changed = [file.path for file, digest in present.items() if digest is not None and digest != file.recorded]
        gone = [file.path for file, digest in present.items() if digest is None]
        if allow_missing:  # an input may be missing where its stage or .dvc file has the recorded hash for it
            made = {path: out.recorded for path, (_, out) in self._makers.items()}
            recorded = {file.path: file.recorded for file in looked_at}
            gone = [path for path in gone if path not in made or made[path] != recorded[path]]
        if code := list(filter(is_code, changed)):
            yield f"code changed: {_first(code)}"
        if gone:
            yield f"{_first(gone)} missing"
        if data := [path for path in changed if not is_code(path)]:
            yield f"{_first(data)} changed"

    def _output_state(self, out: File) -> str:
        """`MISSING`, `EDITED`, `NOT_CACHED`, or empty where the output is what dvc.lock records."""
        if out.in_cache and out.recorded and not out.is_cached:
            return NOT_CACHED
        if not out.exists:
            return MISSING
        return "" if out.known_hash() == out.recorded else EDITED

    def key(self, name: str) -> str | None:
        """The identity of the execution that would come now; None where an input or params.yaml is missing."""
        definition = self._files.stage(name)
        with self._lock, suppress(UserError):
            return definition.key(read_yaml(self.root / PARAMS_FILE), definition.hashes())
        return None

    def forecast(self, graph: Graph, force: bool = False) -> dict[str, tuple[str, list[str]]]:
        """What a run will do with each stage of `graph`, and why: `UNCHANGED`, `RESTORES` where DVC's cache has what
        dvc.lock records for the present inputs, `RUNS`, or `MAY_RUN` below a stage that is not up to date."""
        found: dict[str, tuple[str, list[str]]] = {}
        for stage in graph.stages:
            planned = [name for name, (what, _) in found.items() if what != UNCHANGED]
            why = ["--force"] if force else self.reasons(stage, planned=planned)
            above = {found[need][0] for need in graph.upstream[stage]} - {UNCHANGED}
            held = all(out.is_cached and (out.in_cache or out.exists) for out in self._files.stage(stage).outs)
            if not why and not above:
                found[stage] = UNCHANGED, why
            elif not force and held and above <= {RESTORES} and not self.reasons(stage, allow_missing=True):
                found[stage] = RESTORES, why
            else:
                found[stage] = RUNS if why else MAY_RUN, why
        return found

    def missing(self, name: str) -> list[File]:
        """The outputs of a stage, or of a .dvc file, that are not in the workspace."""
        outs = self._files.sources[name] if name in self._files.sources else self._files.stage(name).outs
        return [out for out in outs if not out.exists]

    def changed_sources(self, graph: Graph) -> tuple[str, ...]:
        """The tracked data files of `graph` that were edited since DVC recorded them, or are missing."""
        return tuple(source for source in graph.all_sources() if self.reasons(source))


def read_graph(root: Path) -> Graph:
    """The graph of the project at `root`. Raises UserError when `dvc.yaml` or `dvc.lock` cannot be read."""
    with opened(root) as project:
        return project.graph


@contextmanager
def opened(root: Path) -> Iterator[Project]:
    """The project at `root`. Raises UserError when its files cannot be read."""
    if (root / PARAMS_FILE).is_file():
        read_yaml(root / PARAMS_FILE)
    with open_project(root) as files:
        yield Project(files)


def brief(reasons: Sequence[str]) -> str:
    """The first reasons and how many more there are, in one line of at most `LONGEST_WHY` characters."""
    more = f" and {len(reasons) - MOST_NAMES} more" if len(reasons) > MOST_NAMES else ""
    return shorten("; ".join(reasons[:MOST_NAMES]), LONGEST_WHY - len(more)) + more


def _with_states(states: Mapping[str, str]) -> list[str]:
    return [
        f"{_first([path for path, found in states.items() if found == state])} {state}"
        for state in dict.fromkeys(filter(None, states.values()))
    ]


def _value(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "(unset)")
    return shorten(value if isinstance(value, str) else json.dumps(value, default=str))


def _first(names: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"
