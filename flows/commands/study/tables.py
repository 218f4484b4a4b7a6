"""The result of a study as Markdown: the best setting, and a row for each setting, compared method and trial. Figures
are means over training seeds, with intervals that contain the variance between them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, variance
from typing import Any

import pandas as pd
from scipy import stats

from flows.commands.study import expressions
from flows.commands.study.trials import FAILED, FINISHED, Call, Trial, short_names
from tasks.page.comparison_table import label
from tasks.page.inputs import interval

NORMAL = 1.959964
"""Half the width of a 95% interval, in standard errors."""
METHOD = (
    "Mean over training seeds with a 95% interval. Its variance is s²/n, with s² the variance between n seeds, plus "
    "the squared standard error over the held-out prompts, which all seeds share. The quantile is Student's t with "
    "Welch–Satterthwaite degrees of freedom: with three seeds and no variance between prompts it is t(2) = 4.30, so "
    "intervals of three seeds are wide. With one seed the interval is over prompts only, and says nothing about "
    "another seed."
)
Groups = dict[str, list[Trial]]
"""The finished trials of each setting by its name."""
Read = Callable[[Trial], tuple[Any, Any]]
"""A number of a trial and its 95% interval over prompts; None for what is not there."""


@dataclass(frozen=True)
class Summary:
    """A mean over n seeds, and its 95% interval; None where there is none: one seed, and no interval over prompts."""

    mean: float
    low: float | None
    high: float | None
    n: int


def summarise(values: Sequence[float], errors: Sequence[float | None]) -> Summary | None:
    """`values` are those of each seed, `errors` their standard errors over prompts (None: not known, counted as 0).
    None without a value."""
    if not values:
        return None
    n, mean = len(values), fmean(values)
    between = variance(values) / n if n > 1 else 0.0
    prompts = fmean((error or 0.0) ** 2 for error in errors)
    if n == 1 and not prompts:
        return Summary(mean, None, None, 1)
    quantile = NORMAL
    if between:  # estimated with n − 1 degrees of freedom; the variance over prompts is taken as known
        quantile = float(stats.t.ppf(0.975, (n - 1) * ((between + prompts) / between) ** 2))
    half = quantile * math.sqrt(between + prompts)
    return Summary(mean, mean - half, mean + half, n)


def standard_error(interval: Sequence[float] | None) -> float | None:
    """Of a 95% interval."""
    return None if not interval else (interval[1] - interval[0]) / (2 * NORMAL)


def metric(*path: str) -> Read:
    """The number at a path such as evaluate, models, policy, gold (of metrics/evaluate.json), and its interval beside
    it."""

    def read(trial: Trial) -> tuple[Any, Any]:
        place: Any = trial.metrics
        for part in path[:-1]:
            place = place.get(part) or {}
        return place.get(path[-1]), interval(place, path[-1])

    return read


COLUMNS = {
    "gold": metric("evaluate", "models", "policy", "gold"),
    "gold of SFT": metric("evaluate", "models", "sft", "gold"),
    "win rate": metric("evaluate", "win_rate"),
    "KL, nats": metric("evaluate", "models", "policy", "kl"),
    "share of the optimum": metric("evaluate", "models", "policy", "optimum_share"),
    "without end token": metric("evaluate", "missing_eos_share"),
    "reward": metric("evaluate", "models", "policy", "reward"),
    "tokens per answer": metric("evaluate", "models", "policy", "response_tokens"),
    "distinct-2": metric("evaluate", "models", "policy", "distinct_2"),
    "reward model accuracy": metric("reward", "heldout_accuracy"),
}

COMPARED = {"gold": "gold", "reward": "reward", "KL, nats": "kl", "tokens per answer": "response_tokens"}
"""What is shown of every method, with its key."""


def report(call: Call, trials: Sequence[Trial]) -> str:
    """The verdicts and all tables that have a row, in Markdown."""
    groups = by_setting(trials)

    def means(read: Read) -> list[Summary | None]:
        return [summary(group, read) for group in groups.values()]

    columns = dict(COLUMNS)
    if call.aim and call.aim not in ("gold_policy", "win_rate"):  # which are columns anyway
        columns = {call.aim: objective_of(call), **columns}
    found = {name: means(read) for name, read in columns.items()}
    found = {name: column for name, column in found.items() if any(column)}
    settings = [["setting", "seeds", *found, "alerts", "seconds"]]
    for place, (name, group) in enumerate(groups.items()):
        cells = [text(column[place]) for column in found.values()]
        times = [trial.seconds for trial in group if trial.seconds is not None]
        seconds = f"{sum(times) / len(times):.0f}" if times else ""
        settings.append([name, str(len(group)), *cells, alerts(group), seconds])

    methods = {name: [[name, *groups]] for name in COMPARED}
    for name, model in product(COMPARED, _keys(trials, "models")):
        if any(row := means(metric("evaluate", "models", model, COMPARED[name]))):
            methods[name].append([label(model), *map(text, row)])
    leads = [["PPO less, at its KL", *groups]]
    for model in _keys(trials, "frontier"):  # cross-fitted; nothing outside the KL of PPO's snapshots
        leading = means(metric("evaluate", "frontier", model, "gold_gap"))
        if any(leading):
            leads.append([label(model), *(text(one, "+.3f") for one in leading)])

    each = [["trial", "state", "gold", "win rate", "KL, nats", "step of the highest gold", "alerts", "seconds"]]
    for trial in trials:
        cells = [number(COLUMNS[name](trial)[0]) for name in ("gold", "win rate", "KL, nats")]
        points = [row for row in trial.frontier if row["family"] in ("sft", "ppo") and pd.notna(row["gold"])]
        steps = sorted((row["point"], row["gold"]) for row in points)
        peak = max(steps, key=lambda step: float(step[1]), default=None)
        each.append([
            trial.name, trial.state, *cells, "" if peak is None else f"{peak[0]:g}",
            alerts([trial]) if trial.metrics else "", "" if trial.seconds is None else f"{trial.seconds:.0f}",
        ])  # fmt: skip

    tables = {"Settings": settings} | {f"Compared methods: {name}": rows for name, rows in methods.items()}
    tables["PPO and the alternatives at equal KL"] = leads
    tables["Trials"] = each
    parts = [f"### {title}\n\n{markdown(cells)}" for title, cells in tables.items() if len(cells) > 1]
    failed = [f"- {trial.name} FAILED: {trial.message}" for trial in trials if trial.state == FAILED]
    return "\n\n".join(["\n".join(verdicts(call, trials)), *parts, METHOD, "\n".join(failed)]).strip()


def verdicts(call: Call, trials: Sequence[Trial]) -> list[str]:
    """A sentence on the best setting, without and with the constraint, and one on a trial that lacks a value."""
    if call.aim is None:
        return []
    lines, what, groups = [], f"{'Highest' if call.maximise else 'Lowest'} {call.aim}", by_setting(trials)
    candidates = {what: groups}
    if call.constraint:
        candidates[f"{what} where {call.constraint}"] = {
            name: group  # the mean over the seeds satisfies it
            for name, group in groups.items()
            if not any(one.unmeasured for one in group) and sum(one.violation or 0.0 for one in group) <= 0
        }
    for what, allowed in candidates.items():
        best = list(ranked(call, allowed).items())[:2]
        if not best:
            lines.append(f"{what}: no setting yet.")
            continue
        line = f"{what}: {best[0][0]}, {text(best[0][1])}."
        if len(best) == 2:
            (_, one), (second, other) = best
            ends = (one.low, one.high, other.low, other.high)
            separate = None not in ends and bool(one.low > other.high or other.low > one.high)  # type: ignore[operator]
            words = ("Its", "are apart") if separate else ("Not separated: its", "overlap")
            line += f" {words[0]} interval and that of {second}, the second, {words[1]}."
        lines.append(line)
    missing = [f"Without a value: {trial.unmeasured}" for trial in trials if trial.unmeasured]
    return [*lines, *missing[:1]]


def by_setting(trials: Sequence[Trial]) -> Groups:
    """The finished trials of each setting, named such as `coef 0.05`, in the order of the trials; settings without one
    have an empty list."""
    keys = list(dict.fromkeys(name for trial in trials for name, _ in trial.setting))
    short = dict(zip(keys, short_names(keys), strict=True))
    groups: Groups = {}
    for trial in trials:
        name = ", ".join(f"{short[name]} {value}" for name, value in trial.setting) or "as committed"
        groups.setdefault(name, []).extend([trial] if trial.state == FINISHED else [])
    return groups


def ranked(call: Call, groups: Groups) -> dict[str, Summary]:
    """The mean objective of the settings that have one, the best first."""
    found = {name: value for name, group in groups.items() if (value := summary(group, objective_of(call)))}
    return dict(sorted(found.items(), key=lambda item: item[1].mean, reverse=call.maximise))


def summary(trials: Sequence[Trial], read: Read) -> Summary | None:
    """Over the seeds that have the number."""
    found = [pair for pair in map(read, trials) if isinstance(pair[0], int | float)]
    return summarise([float(value) for value, _ in found], [standard_error(ends) for _, ends in found])


def objective_of(call: Call) -> Read:
    """The objective; its interval over prompts is known where it is one metric of metrics/evaluate.json."""
    return lambda trial: (trial.objective, interval(trial.metrics.get(expressions.FIRST, {}), str(call.aim)))


def _keys(trials: Sequence[Trial], block: str) -> list[str]:
    """The models that a block of metrics/evaluate.json has in any trial."""
    blocks = [trial.metrics.get("evaluate", {}).get(block) or {} for trial in trials]
    return list(dict.fromkeys(name for found in blocks for name in found))


def alerts(trials: Sequence[Trial]) -> str:
    """The names of the alerts of PPO, each once."""
    found = [alert["name"] for trial in trials for alert in trial.metrics.get("ppo", {}).get("alerts") or []]
    return ", ".join(dict.fromkeys(found)) or "none"


def text(value: Summary | None, form: str = ".3f") -> str:
    """The mean and its interval; zero has no minus."""
    if value is None:
        return "–"
    form = form.replace(".", "z.")
    ends = "" if value.low is None else f" ({value.low:{form}} to {value.high:{form}})"
    return f"{value.mean:{form}}{ends}".replace("-", "−")


def number(value: Any) -> str:
    """A figure of one trial."""
    return f"{value:z.3f}".replace("-", "−") if isinstance(value, int | float) else "–"


def markdown(cells: list[list[str]]) -> str:
    """The table in Markdown; the first row is its heading."""
    lines = [cells[0], ["---" for _ in cells[0]], *cells[1:]]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
