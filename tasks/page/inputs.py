"""What the report is made of: the metrics, curves, samples and parameters of one run, read from the repository's files
into plain values. Nothing is drawn or worded here."""

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_core.errors import UserError
from tasks.params.loader import read_yaml

METRICS = ("ingest", "base", "sft", "preferences", "reward", "ppo", "select", "evaluate")
CURVES = ("sft", "reward", "reward_calibration", "ppo")
FRONTIER = "plots/frontier.csv"

Row = dict[str, Any]
Curve = dict[str, list[float]]
"""Columns of a CSV file, all of one length; NaN where a cell is empty or no number."""


@dataclass(frozen=True)
class Run:
    """One run, as its outputs tell it."""

    metrics: dict[str, Row]
    """By stage: the content of `metrics/<stage>.json`."""
    curves: dict[str, Curve]
    """By name: the content of `plots/<name>.csv`."""
    samples: list[Row]
    """Rows of `data/evaluate/samples.jsonl`: one held-out prompt with both answers and their scores."""
    answers: list[Row]
    """Rows of `data/evaluate/answers.jsonl`: one answer of one model."""
    frontier: list[Row]
    """Rows of `plots/frontier.csv`: a model, or a point of a family of them, with numbers (None where empty)."""
    params: Row
    """`params.yaml` without its `runtime` block, which changes no result."""

    @property
    def evaluation(self) -> Row:
        """The held-out figures."""
        return self.metrics["evaluate"]

    @property
    def has_judge(self) -> bool:
        """True when a judge other than the reward model scored the answers."""
        return all(finite(self.evaluation.get(key)) is not None for key in ("gold_sft", "gold_policy"))

    @property
    def judged_by(self) -> str:
        """What decides the win rate: a judge's `scores`, a judge that compares `pairs`, or the `reward model`."""
        if known := self.evaluation.get("judged_by"):
            return str(known)
        older = "reward model" if "reward model" in str(self.evaluation["win_rate_judge"]) else "pairs"
        return "scores" if self.has_judge else older

    @property
    def is_judged(self) -> bool:
        """True when the win rate is not the reward model's own."""
        return self.judged_by != "reward model"

    @property
    def score(self) -> Literal["gold", "win_rate", "reward"]:
        """What tells best how good an answer is: the judge's score; where the judge only compares, the win rate against
        SFT; where there is no judge, the proxy."""
        return "gold" if self.has_judge else "win_rate" if self.is_judged else "reward"

    @property
    def alerts(self) -> list[Row]:
        """What the detectors of PPO said: rows of name, step, message and remedy."""
        return list(self.metrics["ppo"].get("alerts") or [])

    @property
    def snapshots(self) -> list[Row]:
        """The rows of the frontier that are PPO's snapshots, in the order of their steps."""
        return sorted((row for row in self.frontier if row["family"] == "ppo"), key=lambda row: row["point"])

    @property
    def judge(self) -> str:
        """Whose win rate it is, ready to stand in a sentence."""
        return "the " + str(self.evaluation["win_rate_judge"]).removeprefix("the ")


def read_run(samples: list[Row], answers: list[Row], root: Path = Path()) -> Run:
    """Everything but samples and answers, from the files under `root`.

    Raises UserError for a file that is missing or cannot be read, and for a win rate without its judge.
    """
    metrics = {stage: _read_json(root / "metrics" / f"{stage}.json") for stage in METRICS}
    curves = {name: _read_csv(root / "plots" / f"{name}.csv") for name in CURVES}
    params = {key: value for key, value in read_yaml(root / "params.yaml").items() if key != "runtime"}
    if finite(metrics["evaluate"].get("win_rate")) is None or not metrics["evaluate"].get("win_rate_judge"):
        raise UserError("metrics/evaluate.json: win_rate or win_rate_judge is missing; run the stage evaluate again")
    return Run(metrics, curves, samples, answers, _read_frontier(root / FRONTIER), params)


def finite(value: Any) -> float | None:
    """`value` as a float, or None where it is missing, no number, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def interval(value: Any) -> tuple[float, float] | None:
    """`[low, high]` as two floats, or None where either end is missing."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    low, high = finite(value[0]), finite(value[1])
    return None if low is None or high is None else (low, high)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: file not found; run the stages before report first") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason}); run the stage that writes it again") from None


def _read_json(path: Path) -> Row:
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise UserError(f"{path}: broken JSON ({error}); run the stage that writes it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _read_frontier(path: Path) -> list[Row]:
    """Rows whose point or KL is missing have no place in a picture and are left out."""
    table = csv.DictReader(_read_text(path).splitlines())
    missing = [name for name in ("family", "point", "kl") if name not in (table.fieldnames or ())]
    if missing:
        raise UserError(f"{path}: no column {missing[0]}; run the stage evaluate again")
    rows = [{key: value if key == "family" else _number(value) for key, value in row.items()} for row in table]
    return [row for row in rows if row["point"] is not None and row["kl"] is not None]


def _number(cell: str | None) -> float | None:
    value = _cell([cell or ""], 0)
    return None if math.isnan(value) else value


def _read_csv(path: Path) -> Curve:
    rows = list(csv.reader(_read_text(path).splitlines()))
    if not rows:
        return {}
    header, body = rows[0], [row for row in rows[1:] if row]
    return {name: [_cell(row, index) for row in body] for index, name in enumerate(header)}


def _cell(row: list[str], index: int) -> float:
    try:
        value = float(row[index])
    except (IndexError, ValueError):
        return math.nan
    return value if math.isfinite(value) else math.nan
