"""The result of a study as Markdown: the best setting, and a row for each setting, compared method and trial."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flows.commands.study import expressions
from flows.commands.study.grid import short_names
from flows.commands.study.picture import snapshot_rows
from flows.commands.study.results import FAILED, FINISHED, Trial
from flows.commands.study.statistics import METHOD, Summary, standard_error, summarise
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
class Aim:
    """What is best: the highest or lowest objective, where the constraint holds. Both are expressions over metrics."""

    objective: str | None = None
    constraint: str | None = None
    maximise: bool = True


def report(aim: Aim, trials: Sequence[Trial]) -> str:
    """The verdicts and all tables that have a row, in Markdown."""
    tables = (
        ("Settings", setting_table(aim, trials)),
        ("Compared methods", method_table(trials)),
        ("PPO and the alternatives at equal KL", lead_table(trials)),
        ("Trials", trial_table(trials)),
    )
    parts = [f"### {title}\n\n{markdown(cells)}" for title, cells in tables if len(cells) > 1]
    failed = [f"- {trial.name} FAILED: {trial.message}" for trial in trials if trial.state == FAILED]
    return "\n\n".join(["\n".join(verdicts(aim, trials)), *parts, METHOD, "\n".join(failed)]).strip()


def verdicts(aim: Aim, trials: Sequence[Trial]) -> list[str]:
    """A sentence on the best setting, without and with the constraint."""
    if aim.objective is None:
        return []
    word = "Highest" if aim.maximise else "Lowest"
    lines = [_verdict(f"{word} {aim.objective}", aim, trials, constrained=False)]
    if aim.constraint:
        lines.append(_verdict(f"{word} {aim.objective} where {aim.constraint}", aim, trials, constrained=True))
    missing = unmeasured(aim, [trial for trial in trials if trial.state == FINISHED])
    return [*lines, *([f"Without a value: {missing}"] if missing else [])]


def _verdict(what: str, aim: Aim, trials: Sequence[Trial], constrained: bool) -> str:
    """The best setting by the mean objective, of those whose mean satisfies the constraint where `constrained`."""
    read = objective_of(str(aim.objective))
    found = {
        name: value
        for name, group in by_setting(trials).items()
        if (value := summary(group, read)) is not None and (not constrained or satisfied(aim, group))
    }
    order = sorted(found, key=lambda name: found[name].mean, reverse=aim.maximise)
    if not order:
        return f"{what}: no setting yet."
    line = f"{what}: {order[0]}, {text(found[order[0]])}."
    if len(order) == 1:
        return line
    one, other = found[order[0]], found[order[1]]
    ends = (one.low, one.high, other.low, other.high)
    separate = None not in ends and bool(one.low > other.high or other.low > one.high)  # type: ignore[operator]
    words = ("Its", "are apart") if separate else ("Not separated: its", "overlap")
    return f"{line} {words[0]} interval and that of {order[1]}, the second, {words[1]}."


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
        name: [each for each in trials if each.setting == setting and each.state == FINISHED]
        for setting, name in names.items()
    }


def summary(trials: Sequence[Trial], read: Read) -> Summary | None:
    """Over the seeds that have the number."""
    found = [pair for pair in map(read, trials) if isinstance(pair[0], int | float)]
    return summarise([float(value) for value, _ in found], [standard_error(ends) for _, ends in found])


def setting_table(aim: Aim, trials: Sequence[Trial]) -> Cells:
    """A row for each setting: mean over seeds and interval. Columns that no trial has are left out."""
    columns = dict(COLUMNS)
    if aim.objective and aim.objective != "gold_policy":  # which is the first column anyway
        columns = {aim.objective: objective_of(aim.objective), **columns}
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


def unmeasured(aim: Aim, trials: Sequence[Trial]) -> str:
    """Why objective or constraint have no value in the first trial that lacks one; empty where all have both."""
    for trial in trials:
        try:
            if aim.objective is not None:
                expressions.evaluate(aim.objective, trial.metrics)
            if aim.constraint is not None:
                expressions.violation(aim.constraint, trial.metrics)
        except UserError as error:
            return f"{trial.name}: {error}"
    return ""


def best_settings(aim: Aim, trials: Sequence[Trial], most: int) -> dict[str, list[Trial]]:
    """The finished trials of each setting; of more than `most` settings those with the best mean objective."""
    groups = by_setting(trials)
    if len(groups) <= most or aim.objective is None:
        return groups
    read = objective_of(aim.objective)
    means = {name: found.mean for name, group in groups.items() if (found := summary(group, read))}
    chosen = sorted(means, key=means.__getitem__, reverse=aim.maximise)[:most]
    return {name: group for name, group in groups.items() if name in chosen}


def satisfied(aim: Aim, group: Sequence[Trial]) -> bool:
    """Whether the mean violation over the seeds is at most 0."""
    if aim.constraint is None:
        return True
    if unmeasured(aim, group):
        return False
    amounts = [expressions.violation(aim.constraint, trial.metrics) for trial in group]
    return sum(amounts) <= 0


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


def _lead(name: str) -> Read:
    """PPO's gold score minus that of an alternative at the alternative's KL, cross-fitted: `frontier` of
    metrics/evaluate.json. None outside the KL of PPO's snapshots."""

    def read(trial: Trial) -> tuple[Any, Any]:
        found = (trial.metrics.get("evaluate", {}).get("frontier") or {}).get(name) or {}
        return found.get("gold_gap"), interval(found, "gold_gap")

    return read


def lead_table(trials: Sequence[Trial]) -> Cells:
    """PPO's gold score minus that of each alternative at the alternative's KL."""
    groups = by_setting(trials)
    names = list(
        dict.fromkeys(name for trial in trials for name in trial.metrics.get("evaluate", {}).get("frontier") or {})
    )
    found = {name: [summary(group, _lead(name)) for group in groups.values()] for name in names}
    rows = [[label(name), *(text(one, "+.3f") for one in row)] for name, row in found.items() if any(row)]
    return [["PPO less, at its KL", *groups], *rows] if rows else []


def trial_table(trials: Sequence[Trial]) -> Cells:
    """A row for each trial: how it ended, its main figures, and where the gold score was highest."""
    rows = []
    for trial in trials:
        cells = [COLUMNS[name](trial)[0] for name in ("gold", "win rate", "KL, nats")]
        peak = max(snapshot_rows(trial), key=lambda row: float(row["gold"]), default=None)
        rows.append([
            trial.name, trial.state, *map(number, cells), "" if peak is None else f"{peak['point']:g}",
            alerts([trial]) if trial.metrics else "", "" if trial.seconds is None else f"{trial.seconds:.0f}",
        ])  # fmt: skip
    return [["trial", "state", "gold", "win rate", "KL, nats", "step of the highest gold", "alerts", "seconds"], *rows]


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


def number(value: Any) -> str:
    """A figure of one trial."""
    return f"{value:.3f}".replace("-", "−") if isinstance(value, int | float) else "–"


def markdown(cells: Cells) -> str:
    """The table in Markdown; empty without a row."""
    if not cells:
        return ""
    lines = [cells[0], ["---" for _ in cells[0]], *cells[1:]]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
