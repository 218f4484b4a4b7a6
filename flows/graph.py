"""The graph of stages as DVC reads it from `dvc.yaml`, in the order in which `dvc repro` would run it. Knows nothing of
Prefect; nobody writes the list of stages down a second time."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import UserError


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
            raise UserError(f"unknown stage {', '.join(unknown)}; dvc.yaml has: {', '.join(self.stages)}")
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
    """The graph of the project at `root`. Raises UserError when DVC cannot read it, or `dvc.lock`.

    DVC expands every alias of params.yaml as soon as it opens a project: `read_yaml` refuses endless ones before.
    """
    from tasks.params.loader import PARAMS_FILE, read_yaml
    from tasks.stage.dvc_adapter import open_project

    if (root / PARAMS_FILE).is_file():
        read_yaml(root / PARAMS_FILE)
    with open_project(root) as project:
        plan = project.plan()
    upstream = {name: tuple(stages) for name, stages, _ in plan}
    return Graph(tuple(upstream), upstream, {name: tuple(sources) for name, _, sources in plan})
