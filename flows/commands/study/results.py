"""The results of one trial, as its DVC experiment recorded them."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Metrics = dict[str, dict[str, Any]]
"""The content of metrics/*.json by the file's name."""
Table = list[dict[str, Any]]
"""The rows of a CSV: numbers where a cell is one, None where it is empty."""


@dataclass(frozen=True)
class Trial:
    """One run of the pipeline: its setting, its training seed, how it ended, and what it measured."""

    name: str
    """Also of its DVC experiment and its MLflow run."""
    setting: tuple[tuple[str, Any], ...]
    """The varied parameters and their values, without the seed."""
    seed: int
    state: str
    """waiting, running, finished or failed; only a finished trial has metrics and tables."""
    metrics: Metrics
    tables: dict[str, Table]
    """plots/*.csv by the file's name."""
    params: dict[str, Any]
    seconds: float | None = None
    message: str = ""
    """Why it failed."""


@dataclass(frozen=True)
class StudyInfo:
    """What the page says about the study as a whole."""

    name: str
    commit: str
    command: str
    objective: str | None = None
    constraint: str | None = None
    maximise: bool = True


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
