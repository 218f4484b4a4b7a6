"""The graph of stages as DVC reads it from `dvc.yaml`, its only definition, in the order of `dvc repro`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from tasks.stage.dvc_adapter import Project


@dataclass(frozen=True)
class Graph:
    """The stages that have a command, each after everything it needs."""

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


def read_graph(root: Path) -> Graph:
    """The graph of the project at `root`. Raises UserError when DVC cannot read `dvc.yaml` or `dvc.lock`."""
    with open_graph(root) as (_, graph):
        return graph


@contextmanager
def open_graph(root: Path) -> Iterator[tuple["Project", Graph]]:
    """The project at `root`, open while the block lasts, and its graph. Raises UserError as `read_graph`.

    params.yaml is read first: DVC expands every YAML alias in it when it opens a project, and would hang on a bomb.
    """
    from tasks.params.loader import PARAMS_FILE, read_yaml
    from tasks.stage.dvc_adapter import open_project

    if (root / PARAMS_FILE).is_file():
        read_yaml(root / PARAMS_FILE)
    with open_project(root) as project:
        plan = project.plan()
        upstream = {name: tuple(stages) for name, stages, _ in plan}
        yield project, Graph(tuple(upstream), upstream, {name: tuple(sources) for name, _, sources in plan})
