"""One trial of a study: what it runs, how far it is, and what its DVC experiment recorded."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flows.commands.study.grid import Combination, value_of

WAITING, RUNNING, FINISHED, FAILED = "waiting", "running", "finished", "failed"
Metrics = dict[str, dict[str, Any]]
"""The content of metrics/*.json by the file's name."""
Table = list[dict[str, Any]]
"""The rows of a CSV: numbers where a cell is one, None where it is empty."""


@dataclass
class Trial:
    """One run of the pipeline: its overrides and parameters, how far it is, how it ended, and what it measured."""

    combination: Combination
    params: dict[str, Any]
    """All of its parameters."""
    state: str = WAITING
    metrics: Metrics = field(default_factory=dict)
    """Of a finished trial only, as `tables`."""
    tables: dict[str, Table] = field(default_factory=dict)
    """plots/*.csv by the file's name."""
    seconds: float | None = None
    message: str = ""
    """Why it failed, and where its workspace is."""
    progress: str = ""
    began: float = 0.0

    @property
    def name(self) -> str:
        """Also of its DVC experiment and its MLflow run."""
        return self.combination.name

    @property
    def seed(self) -> int:
        """Its training seed."""
        seed = self.combination.seed
        return int(self.params["seed"]) if seed is None else seed

    @property
    def setting(self) -> tuple[tuple[str, Any], ...]:
        """The varied parameters and their values in params.yaml, without the seed."""
        return tuple((name, value_of(self.params, name)) for name, _ in self.combination.setting)


def read_metrics(files: Mapping[str, bytes]) -> Metrics:
    """metrics/*.json by name. Raises ValueError for a file that is no JSON."""
    return {_stem(path): json.loads(content) for path, content in files.items() if path.startswith("metrics/")}


def read_tables(files: Mapping[str, bytes]) -> dict[str, Table]:
    """plots/*.csv by name."""
    found = {path: content.decode("utf-8").splitlines() for path, content in files.items() if path.endswith(".csv")}
    return {
        _stem(path): [{name: _cell(text) for name, text in row.items()} for row in csv.DictReader(lines)]
        for path, lines in found.items()
    }


def _stem(path: str) -> str:
    return path.rpartition("/")[2].rpartition(".")[0]


def _cell(text: str) -> float | str | None:
    try:
        return float(text) if text else None
    except ValueError:
        return text
