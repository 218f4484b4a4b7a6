"""Runs of the graph in a fresh clone of the commit, for the benchmarks that repeat it with other parameters."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]

Metrics = dict[str, dict[str, Any]]
"""The content of metrics/*.json by the file's name."""
Table = list[dict[str, Any]]
"""The rows of a CSV: numbers where a cell is one, None where it is empty."""


@dataclass(frozen=True)
class Result:
    """Metrics, tables (plots/*.csv by name), wall-clock seconds, parameters and commit of one run."""

    metrics: Metrics
    tables: dict[str, Table]
    seconds: float
    params: dict[str, Any]
    commit: str = ""


def with_seed(params: Mapping[str, Any], seed: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the parameters with both seeds set, and `changes`, whose keys are dotted. Raises KeyError for a block
    that does not exist."""
    changed: dict[str, Any] = json.loads(json.dumps(params))
    for name, value in ({"seed": seed, "ingest.seed": seed} | dict(changes)).items():
        *blocks, key = name.split(".")
        block = changed
        for part in blocks:
            block = block[part]
        block[key] = value
    return changed


def read_params(path: Path) -> dict[str, Any]:
    """A parameter file as plain values. Raises SystemExit, naming the file, where it cannot be read."""
    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}; name a parameter file with --params") from error
    return dict(content)


def clone(folder: Path) -> None:
    """A clone of the project in `folder`, unless one is there already."""
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)


def reproduce(folder: Path, params: Mapping[str, Any]) -> float:
    """`dvc repro` in a clone with these parameters; wall-clock seconds. A parameter file with equal values is not
    rewritten, which would remove its comments. Raises CalledProcessError when a stage fails."""
    path = folder / "params.yaml"
    if read_params(path) != params:
        with path.open("w", encoding="utf-8") as file:
            YAML().dump(dict(params), file)
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "dvc", "repro"],
        cwd=folder,
        check=True,
        env=os.environ | {"PATH": search},
        stdout=sys.stderr,
    )
    return time.monotonic() - start


def differs(folder: Path, name: str) -> bool:
    """Whether a file of the clone differs from the commit."""
    return subprocess.run(["git", "diff", "--quiet", "--", name], cwd=folder).returncode != 0


def keep(run: Path, params: Mapping[str, Any], seconds: float, kept: Path) -> None:
    """Copy metrics/*.json and plots/*.csv of a run to the folder `kept`, with commit, seconds and parameters
    (run.json). The folder is renamed into place when it is complete."""
    partial = kept.with_name(f"{kept.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for folder, pattern in (("metrics", "*.json"), ("plots", "*.csv")):
        (partial / folder).mkdir(parents=True)
        for file in sorted((run / folder).glob(pattern)):
            shutil.copyfile(file, partial / folder / file.name)
    made = {"commit": commit_of(run), "seconds": round(seconds, 1), "params": params}
    (partial / "run.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(kept, ignore_errors=True)
    partial.rename(kept)


def commit_of(folder: Path) -> str:
    """The commit of a clone; empty outside a repository."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def kept_run(kept: Path, params: Mapping[str, Any]) -> Result | None:
    """The run that `keep` copied there; None where there is none, or one with other parameters."""
    if not (kept / "run.json").exists():
        return None
    made = json.loads((kept / "run.json").read_text(encoding="utf-8"))
    return result(kept, made["params"], made["seconds"], made["commit"]) if made["params"] == params else None


def result(run: Path, params: Mapping[str, Any], seconds: float, commit: str = "") -> Result:
    """The metrics and tables of a run, or of a folder that `keep` made."""
    metrics = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in (run / "metrics").glob("*.json")}
    tables = {file.stem: read_table(file) for file in (run / "plots").glob("*.csv")}
    return Result(metrics, tables, seconds, dict(params), commit)


def read_table(path: Path) -> Table:
    """The rows of a CSV."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: _cell(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _cell(text: str) -> float | str | None:
    try:
        return float(text) if text else None
    except ValueError:
        return text


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(value: object, signed: bool = False) -> str:
    """A cell: numbers with three decimals, an interval as "low to high", a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, list):
        return " to ".join(text(part, signed) for part in value)
    if isinstance(value, float):
        return f"{value:+.3f}".replace("-", "−") if signed else f"{value:.3f}".replace("-", "−")
    return str(value)
