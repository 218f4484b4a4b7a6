"""The tables of a study: a row for each setting, for each compared method, and for each trial."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flows.commands.study import expressions
from flows.commands.study.grid import short_names
from flows.commands.study.points import lead, snapshot_rows
from flows.commands.study.results import StudyInfo, Trial
from flows.commands.study.statistics import Summary, standard_error, summarise
from rlhf_core.errors import UserError
from tasks.page.comparison_table import label
from tasks.page.inputs import interval

Cells = list[list[str]]
"""Rows of a table; the first is its heading."""
Read = Callable[[Trial], tuple[Any, Any]]
"""A number of a trial and its 95% interval over prompts; None for what is not there."""


def _of(name: str, *path: str) -> Read:
    """The metric at `path` of metrics/<name>.json, and its interval beside it."""

    def read(trial: Trial) -> tuple[Any, Any]:
        place: Any = trial.metrics.get(name, {})
        for part in path[:-1]:
            place = (place or {}).get(part)
        place = place or {}
        return place.get(path[-1]), interval(place, path[-1])

    return read


COLUMNS: dict[str, Read] = {
    "gold": _of("evaluate", "models", "policy", "gold"),
    "gold of SFT": _of("evaluate", "models", "sft", "gold"),
    "win rate": _of("evaluate", "win_rate"),
    "KL, nats": _of("evaluate", "models", "policy", "kl_exact"),
    "share of the optimum": _of("evaluate", "models", "policy", "optimum_share"),
    "without end token": _of("evaluate", "missing_eos_share"),
    "reward": _of("evaluate", "models", "policy", "reward"),
    "reward model accuracy": _of("reward", "heldout_accuracy"),
}


@dataclass(frozen=True)
class Best:
    """The setting with the best mean objective, the runner-up, and whether their intervals are apart."""

    setting: str
    value: Summary
    second: str = ""
    separated: bool = False


def setting_names(trials: Sequence[Trial]) -> dict[tuple[tuple[str, Any], ...], str]:
    """A short name for each setting, in the order of the trials: `coef 0.05`."""
    keys = list(dict.fromkeys(name for trial in trials for name, _ in trial.setting))
    short = dict(zip(keys, short_names(keys), strict=True))
    settings = dict.fromkeys(trial.setting for trial in trials)
    return {each: ", ".join(f"{short[name]} {value}" for name, value in each) or "as committed" for each in settings}


def by_setting(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """The finished trials of each setting; settings without one have an empty list."""
    names = setting_names(trials)
    return {
        name: [each for each in trials if each.setting == setting and each.state == "finished"]
        for setting, name in names.items()
    }


def summary(trials: Sequence[Trial], read: Read) -> Summary | None:
    """Over the seeds that have the number."""
    found = [pair for pair in map(read, trials) if isinstance(pair[0], int | float)]
    return summarise([float(value) for value, _ in found], [standard_error(ends) for _, ends in found])


def setting_table(info: StudyInfo, trials: Sequence[Trial]) -> Cells:
    """A row for each setting: mean over seeds and interval. Columns that no trial has are left out."""
    columns = dict(COLUMNS)
    if info.objective and info.objective != "gold_policy":  # which is the first column anyway
        columns = {info.objective: objective_of(info.objective), **columns}
    groups = by_setting(trials)
    rows = {name: [summary(group, read) for read in columns.values()] for name, group in groups.items()}
    used = [place for place in range(len(columns)) if any(row[place] for row in rows.values())]
    heading = ["setting", "seeds", *(list(columns)[place] for place in used), "alerts", "seconds"]
    return [heading] + [
        [name, str(len(group)), *(text(rows[name][place]) for place in used), alerts(group), seconds(group)]
        for name, group in groups.items()
    ]


def objective_of(expression: str) -> Read:
    """The objective; its interval over prompts is known where it is one metric of metrics/evaluate.json."""

    def read(trial: Trial) -> tuple[Any, Any]:
        evaluation = trial.metrics.get(expressions.FIRST, {})
        try:
            return expressions.evaluate(expression, trial.metrics), interval(evaluation, expression)
        except UserError:  # `unmeasured` says so
            return None, None

    return read


def unmeasured(info: StudyInfo, trials: Sequence[Trial]) -> str:
    """Why objective or constraint have no value in the first trial that lacks one; empty where all have both."""
    for trial in trials:
        try:
            if info.objective is not None:
                expressions.evaluate(info.objective, trial.metrics)
            if info.constraint is not None:
                expressions.violation(info.constraint, trial.metrics)
        except UserError as error:
            return f"{trial.name}: {error}"
    return ""


def best(info: StudyInfo, trials: Sequence[Trial], constrained: bool) -> Best | None:
    """The best setting by the mean objective, of those whose mean satisfies the constraint where `constrained`."""
    if info.objective is None:
        return None
    read = objective_of(info.objective)
    found = {
        name: value
        for name, group in by_setting(trials).items()
        if (value := summary(group, read)) is not None and (not constrained or satisfied(info, group))
    }
    if not found:
        return None
    order = sorted(found, key=lambda name: found[name].mean, reverse=info.maximise)
    first, second = order[0], (order[1] if len(order) > 1 else "")
    return Best(first, found[first], second, bool(second) and apart(found[first], found[second]))


def satisfied(info: StudyInfo, group: Sequence[Trial]) -> bool:
    """Whether the mean violation over the seeds is at most 0."""
    if info.constraint is None:
        return True
    if unmeasured(info, group):
        return False
    amounts = [expressions.violation(info.constraint, trial.metrics) for trial in group]
    return sum(amounts) <= 0


def apart(one: Summary, other: Summary) -> bool:
    """Whether the intervals do not touch."""
    if None in (one.low, one.high, other.low, other.high):
        return False
    return bool(one.low > other.high or other.low > one.high)  # type: ignore[operator]


def method_table(trials: Sequence[Trial]) -> Cells:
    """The gold score of each compared model, a column for each setting; the reward where there is no judge."""
    score = "gold" if any(_model(trial, "policy").get("gold") is not None for trial in trials) else "reward"
    groups = by_setting(trials)
    names = list(
        dict.fromkeys(name for trial in trials for name in trial.metrics.get("evaluate", {}).get("models", {}))
    )
    rows = [
        [label(name), *(text(summary(group, _of("evaluate", "models", name, score))) for group in groups.values())]
        for name in names
    ]
    return [[score, *groups], *rows] if rows else []


def _model(trial: Trial, name: str) -> dict[str, Any]:
    return dict((trial.metrics.get("evaluate", {}).get("models") or {}).get(name) or {})


def lead_table(trials: Sequence[Trial]) -> Cells:
    """PPO's gold score minus that of each alternative at the alternative's KL."""
    groups = by_setting(trials)
    names = list(
        dict.fromkeys(name for trial in trials for name in trial.metrics.get("evaluate", {}).get("frontier") or {})
    )
    found = {
        name: [summary(group, lambda trial, name=name: lead(trial, name)) for group in groups.values()]  # type: ignore[misc]
        for name in names
    }
    rows = [[label(name), *map(signed, row)] for name, row in found.items() if any(row)]
    return [["PPO less, at its KL", *groups], *rows] if rows else []


def trial_table(trials: Sequence[Trial]) -> Cells:
    """A row for each trial: how it ended, its main figures, and where the gold score was highest."""
    rows = []
    for trial in trials:
        cells = [COLUMNS[name](trial)[0] for name in ("gold", "win rate", "KL, nats")]
        peak = max((row for row in snapshot_rows(trial) if row.get("gold") is not None), key=_gold, default=None)
        rows.append([
            trial.name, trial.state, *map(number, cells), "" if peak is None else f"{peak['point']:g}",
            alerts([trial]) if trial.metrics else "", "" if trial.seconds is None else f"{trial.seconds:.0f}",
        ])  # fmt: skip
    return [["trial", "state", "gold", "win rate", "KL, nats", "step of the highest gold", "alerts", "seconds"], *rows]


def _gold(row: dict[str, Any]) -> float:
    return float(row["gold"])


def alerts(trials: Sequence[Trial]) -> str:
    """The names of the alerts of PPO, each once."""
    found = [alert["name"] for trial in trials for alert in trial.metrics.get("ppo", {}).get("alerts") or []]
    return ", ".join(dict.fromkeys(found)) or "none"


def seconds(trials: Sequence[Trial]) -> str:
    """The mean time of a trial."""
    known = [trial.seconds for trial in trials if trial.seconds is not None]
    return f"{sum(known) / len(known):.0f}" if known else ""


def text(value: Summary | None, form: str = ".3f") -> str:
    """The mean and its interval."""
    if value is None:
        return "–"
    ends = "" if value.low is None else f" ({value.low:{form}} to {value.high:{form}})"
    return f"{value.mean:{form}}{ends}".replace("-", "−")


def signed(value: Summary | None) -> str:
    """As `text`, with the sign."""
    return text(value, "+.3f")


def number(value: Any) -> str:
    """A figure of one trial."""
    return f"{value:.3f}".replace("-", "−") if isinstance(value, int | float) else "–"


def markdown(cells: Cells) -> str:
    """The table in Markdown; empty without a row."""
    if not cells:
        return ""
    lines = [cells[0], ["---" for _ in cells[0]], *cells[1:]]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
