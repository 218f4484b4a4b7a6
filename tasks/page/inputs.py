"""Reads the inputs of the report: metrics, curves, samples and parameters of one run."""

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_core.errors import UserError
from tasks.params.loader import read_yaml

METRICS = ("ingest", "preferences", "reward", "ppo", "select", "evaluate")
CURVES = ("reward_calibration", "ppo")
FRONTIER = "plots/frontier.csv"

Row = dict[str, Any]
Curve = dict[str, list[float]]
"""Columns of a CSV file, all of one length; NaN where a cell is empty or no number."""


@dataclass(frozen=True)
class Run:
    """The outputs of one run."""

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
    """`params.yaml` without its `runtime` block, which changes no result, and without an empty block `round`."""

    @property
    def evaluation(self) -> Row:
        """The content of metrics/evaluate.json."""
        return self.metrics["evaluate"]

    @property
    def models(self) -> dict[str, Row]:
        """The figures of each model, by name."""
        return dict(self.evaluation["models"])

    @property
    def has_judge(self) -> bool:
        """True when a judge other than the scorer scored the answers."""
        return all(finite(self.evaluation.get(key)) is not None for key in ("gold_sft", "gold_policy"))

    @property
    def judged_by(self) -> str:
        """What decides the win rate: a judge's `scores`, a judge that compares `pairs`, the `judging reward model`, the
        `reward model`, that of PPO, or the `scorer` where it is not that model alone."""
        return str(self.evaluation["judged_by"])

    @property
    def is_judged(self) -> bool:
        """True when the win rate is not by the score that PPO maximises."""
        return self.judged_by not in ("reward model", "scorer")

    @property
    def scorer(self) -> str | None:
        """The score that PPO maximises, with its terms; None where it is the reward model's."""
        return self.evaluation.get("scorer")

    @property
    def proxy(self) -> str:
        """What gives the score that PPO maximises."""
        return "scorer" if self.scorer else "reward model"

    @property
    def proxy_score(self) -> str:
        """The name of the score that PPO maximises."""
        return "scorer’s score" if self.scorer else "reward-model score"

    @property
    def has_reward_model(self) -> bool:
        """False where functions alone score."""
        return self.metrics["reward"].get("enabled") is not False

    @property
    def judge_labelled(self) -> bool:
        """True when the judge of the win rate also labelled the pairs that the reward model learned from."""
        return bool(self.evaluation["win_rate_judge"] == self.metrics["preferences"].get("judge"))

    @property
    def score(self) -> Literal["gold", "win_rate", "reward"]:
        """The main score: the judge's score; the win rate if the judge only compares; the proxy without a judge."""
        return "gold" if self.has_judge else "win_rate" if self.is_judged else "reward"

    @property
    def alerts(self) -> list[Row]:
        """PPO's alerts: rows of name, step, message and remedy."""
        return list(self.metrics["ppo"].get("alerts") or [])

    @property
    def optimum(self) -> list[Row]:
        """The ceiling of the frontier, by rising KL: rows of kl, reward, gold and effective_samples."""
        return [row for row in self.evaluation.get("optimum") or [] if finite(row.get("kl")) is not None]

    @property
    def judge(self) -> str:
        """The judge of the win rate, for use in a sentence: with an article, unless it is a file."""
        name = str(self.evaluation["win_rate_judge"])
        return name if name.startswith("rewards/") else "the " + name.removeprefix("the ")


def read_run(samples: list[Row], answers: list[Row], root: Path = Path()) -> Run:
    """Everything but samples and answers, from the files under `root`.

    Raises UserError for a file that is missing or cannot be read, and for an evaluation without its main keys.
    """
    metrics = {stage: _read_json(root / "metrics" / f"{stage}.json") for stage in METRICS}
    curves = {}
    for curve in CURVES:
        names, table = _read_table(root / "plots" / f"{curve}.csv")
        curves[curve] = {name: [_number(row[name]) for row in table] for name in names}
    content = read_yaml(root / "params.yaml")
    params = {key: value for key, value in content.items() if key != "runtime" and value != {}}
    evaluation = metrics["evaluate"]
    required = ("win_rate_judge", "judged_by", "models", "seeds")
    if finite(evaluation.get("win_rate")) is None or not all(evaluation.get(key) for key in required):
        raise UserError(
            f"metrics/evaluate.json: one of win_rate, {', '.join(required)} is missing; run the stage evaluate again"
        )
    return Run(metrics, curves, samples, answers, _read_frontier(root / FRONTIER), params)


def finite(value: Any) -> float | None:
    """`value` as a float, or None where it is missing, no number, NaN or infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def interval(figures: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    """`KEY_low` and `KEY_high` of `figures`, or None where either end is missing."""
    low, high = finite(figures.get(f"{key}_low")), finite(figures.get(f"{key}_high"))
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


def _read_table(path: Path) -> tuple[list[str], list[dict[str, str | None]]]:
    table = csv.DictReader(_read_text(path).splitlines())
    return list(table.fieldnames or ()), list(table)


def _read_frontier(path: Path) -> list[Row]:
    """Rows without point or KL cannot be drawn and are left out."""
    names, table = _read_table(path)
    missing = [name for name in ("family", "point", "kl") if name not in names]
    if missing:
        raise UserError(f"{path}: no column {missing[0]}; run the stage evaluate again")
    rows: list[Row] = [
        {name: row[name] if name == "family" else finite(_number(row[name])) for name in names} for row in table
    ]
    return [row for row in rows if row["point"] is not None and row["kl"] is not None]


def _number(cell: str | None) -> float:
    """The cell's finite number, or NaN."""
    try:
        value = float(cell or "")
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
