"""The graph of stages as DVC reads it from `dvc.yaml`, its only definition, in the order of `dvc repro`."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """The graph of the project at `root`. Raises UserError when DVC cannot read `dvc.yaml` or `dvc.lock`."""
    repo, graph = open_repo(root)
    repo.close()
    return graph


def open_repo(root: Path) -> tuple[Any, Graph]:
    """DVC's repository at `root`, for the caller to close, and its graph. Raises UserError as `read_graph`.

    params.yaml is read first: DVC expands every YAML alias in it when it opens a project, and would hang on a bomb.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    from tasks.params.loader import PARAMS_FILE, read_yaml

    if (root / PARAMS_FILE).is_file():
        read_yaml(root / PARAMS_FILE)
    try:
        repo = Repo(str(root))
        return repo, _convert(repo, root)
    except DvcException as error:
        reason = " ".join(str(error).split()).replace(f"{root}{os.sep}", "")
        if "dvc.lock" in reason:
            raise UserError(
                f"dvc.lock is broken ({reason}); `git checkout dvc.lock` brings back the committed one; results in "
                "DVC's cache are not computed again"
            ) from error
        raise UserError(f"dvc.yaml: DVC cannot read the graph: {reason}") from error


def _convert(repo: Any, root: Path) -> Graph:
    from dvc.repo.reproduce import get_active_graph, plan_repro

    from tasks.stage.contents import address

    graph = get_active_graph(repo.index.graph)
    own = [node for node in graph if address(node, root) == getattr(node, "name", None)]
    plan = list(plan_repro(graph, own)) if own else []
    upstream: dict[str, tuple[str, ...]] = {}
    sources: dict[str, tuple[str, ...]] = {}
    for node in plan:
        if not node.cmd:
            continue
        name = address(node, root)
        above = list(graph.successors(node))
        upstream[name] = tuple(address(other, root) for other in above if other.cmd)
        sources[name] = tuple(address(other, root) for other in above if not other.cmd)
    return Graph(tuple(upstream), upstream, sources)
