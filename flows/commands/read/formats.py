"""Readers of metric files. Each returns the records in the order of the file: a step, and its figures."""

import csv
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flows.commands.read.libraries import NAMES
from rlhf_core.errors import UserError

Record = tuple[int, dict[str, float]]

STEPS = ("step", "global_step", "train/global_step", "training/global_step", "Step", "_step")
"""Names of the step, the first that is there."""
EVENTS = "events.out.tfevents"
MLFLOW = "runs:/"
VERL_LINE = re.compile(r"(?:^|\s)step:(\d+) - (.+)")
"""verl's console: `step:3 - actor/kl_loss:0.01 - …`, behind Ray's prefix."""
OPENRLHF_LINE = re.compile(r"Global step (\d+): \{(.*)\}")
"""OpenRLHF's console: `… Global step 3: {'kl': 0.01, …}`."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""A terminal's code for a colour."""
NUMBER = re.compile(r"(?:np\.\w+\()?([-+\w.]+)\)?")
"""A number as it is printed, `np.float64(0.5)` with NumPy 2."""


def read_records(source: str) -> list[Record]:
    """The records of a file, a folder of TensorBoard event files, or an MLflow run (`runs:/ID`).

    Raises UserError, naming file and line, where there are none or the content is not understood.
    """
    path = Path(source).expanduser()
    if source.startswith(MLFLOW):
        records = _mlflow(source)
    elif path.name.startswith(EVENTS) or (path.is_dir() and list(path.glob(f"{EVENTS}*"))):
        records = _tensorboard(path)
    elif not path.is_file():
        why = f"is a folder without {EVENTS}* files; name a file in it" if path.is_dir() else "file not found"
        raise UserError(f"{source}: {why}")
    else:
        try:
            if path.suffix == ".json":
                records = _json(path)
            elif path.suffix in (".csv", ".tsv"):
                with path.open(encoding="utf-8-sig", newline="") as file:
                    rows = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
                    records = [_record(row, f"{source}, line {rows.line_num}") for row in rows]
            else:
                records = list(_lines(path))
        except UnicodeDecodeError:
            raise UserError(f"{source}: is not text in UTF-8, and its name is not that of a known format") from None
        except (OSError, csv.Error) as error:
            raise UserError(f"{source}: cannot be read ({error})") from None
    if not records:
        raise UserError(
            f"{source}: no metrics found; expected trainer_state.json, JSON lines, CSV, a console log of verl or "
            "OpenRLHF, TensorBoard's event files, or runs:/ID of MLflow"
        )
    return records


def _json(path: Path) -> list[Record]:
    """trainer_state.json of transformers, or a list of records."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error})") from None
    rows = content.get("log_history") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        found = ", ".join(list(content)[:8]) if isinstance(content, dict) else type(content).__name__
        raise UserError(f"{path}: expected trainer_state.json, with log_history, or a list of records; found {found}")
    return [_record(row, f"{path}, record {number}") for number, row in enumerate(rows, 1)]


def _lines(path: Path) -> Iterator[Record]:
    """JSON lines, or a console log, whose other lines are skipped. A last line that was cut off is skipped, too."""
    strict = path.suffix in (".jsonl", ".ndjson")
    with path.open(encoding="utf-8-sig", errors="strict" if strict else "replace") as file:
        for number, line in enumerate(file, 1):
            line = COLOUR.sub("", line)
            if verl := VERL_LINE.search(line):
                pairs = (pair.rpartition(":") for pair in verl[2].split(" - "))
                yield int(verl[1]), _numbers({name.strip(): text for name, _, text in pairs})
            elif openrlhf := OPENRLHF_LINE.search(line):
                yield int(openrlhf[1]), _numbers(dict(re.findall(r"'([^']+)': ([^,]+)", openrlhf[2])))
            elif line.lstrip().startswith("{") or (strict and line.strip()):
                try:
                    row = json.loads(line)
                except ValueError as error:
                    if strict and line.endswith("\n"):
                        raise UserError(f"{path}, line {number}: is not JSON ({error})") from None
                    continue
                if strict or any(name in row for name in STEPS):
                    yield _record(row, f"{path}, line {number}")


def _record(row: Any, place: str) -> Record:
    """A row with its step beside the figures; verl's file logger has the figures in `data`."""
    if not isinstance(row, Mapping):
        raise UserError(f"{place}: expected an object with figures, found {type(row).__name__}")
    if isinstance(row.get("data"), Mapping):
        row = {"step": row.get("step"), **row["data"]}
    values = _numbers(row)
    step = next((values[name] for name in STEPS if name in values), None)
    if step is None or not step.is_integer():
        names = ", ".join(str(name) for name in list(row)[:8])
        raise UserError(f"{place}: no whole number as step (a column {' or '.join(STEPS[:2])}); found {names}")
    return int(step), values


def _numbers(row: Mapping[Any, Any]) -> dict[str, float]:
    """What is a number, or the text of one, without the prefix `train/` of trackers. NaN and infinity stay."""
    found = {}
    for name, value in row.items():
        text = NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
        if isinstance(name, str) and not isinstance(value, bool) and (text or isinstance(value, int | float)):
            try:
                found[name if name in STEPS else name.removeprefix("train/")] = float(text[1] if text else value)
            except (ValueError, OverflowError):
                continue
    return found


def _tensorboard(path: Path) -> list[Record]:
    """The scalars of an event file, or of all event files of a folder."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise UserError(f"{path}: TensorBoard's event files need: pip install 'tensorboard>=2.21,<3'") from None
    if not path.exists():
        raise UserError(f"{path}: file not found")
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return _in_order(
        (tag, event.wall_time, event.step, event.value)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    )


def _in_order(points: Iterable[tuple[str, float, int, float]]) -> list[Record]:
    """The records of (name, time, step, value). Where a name has a step twice, training was resumed or is another run:
    then the points are in the order of time, and a step that is below the one before begins another part."""
    found = list(points)
    repeats = len({(name, step) for name, _, step, _ in found}) < len(found)
    rows: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    part, before = 0, -math.inf
    for name, _, step, value in sorted(found, key=lambda point: point[1:3]):
        part, before = part + (repeats and step < before), step
        rows[part, step] |= _numbers({name: value})
    return [(step, values) for (_, step), values in sorted(rows.items())]


def _mlflow(source: str) -> list[Record]:
    """The metrics of a run on the server of MLFLOW_TRACKING_URI."""
    if "MLFLOW_TRACKING_URI" not in os.environ:  # MLflow would create a database here
        raise UserError(f"{source}: set MLFLOW_TRACKING_URI to the server or database that has the run")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client, identity = MlflowClient(), source.removeprefix(MLFLOW)
    points: list[tuple[str, float, int, float]] = []
    try:
        recorded = client.get_run(identity).data.metrics
        for name in recorded:
            # One request each: those of no library are only named, with their last value.
            known = name.removeprefix("train/") in NAMES or "loss" in name or "norm" in name
            history = client.get_metric_history(identity, name) if known else []
            points += [(name, metric.timestamp, metric.step, metric.value) for metric in history]
    except MlflowException as error:
        raise UserError(f"{source}: not found at MLFLOW_TRACKING_URI ({error.message})") from None
    if recorded and not points:
        raise UserError(f"{source}: no metrics of a known library; found {', '.join(sorted(recorded)[:12])}")
    return _in_order(points)
