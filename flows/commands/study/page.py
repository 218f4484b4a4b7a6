"""The page of a study: one HTML document with its tables and pictures; and the same tables as Markdown."""

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from flows.commands.study import pictures, tables
from flows.commands.study.points import Runs, frontier_points, snapshot_costs
from flows.commands.study.results import StudyInfo, Trial
from flows.commands.study.statistics import METHOD
from tasks.page import page as report_page
from tasks.page.page import write_page

HERE = Path(__file__).parent
MOST_DRAWN = 12
"""Settings in a picture; with more, the best are drawn."""
CAPTIONS = {
    "frontier": "Gold score and reward-model score at equal KL. A thin line is one seed, a thick one the mean; points "
    "are the compared methods of the first setting; the dashed line is the optimum against the reward model.",
    "equal-tokens": "Gold score at equal response tokens in training.",
    "equal-samples": "Gold score at equal sampled responses in training.",
}


def write(path: Path, info: StudyInfo, trials: Sequence[Trial]) -> None:
    """Write the page of what has ended so far."""
    environment = Environment(
        loader=FileSystemLoader([HERE, Path(report_page.__file__).parent]), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    states = [trial.state for trial in trials]
    page = environment.get_template("study.html.j2").render(
        info=info,
        states={state: states.count(state) for state in dict.fromkeys(states)},
        verdicts=verdicts(info, trials),
        sections=sections(info, trials),
        pictures=[(name, embed(content), CAPTIONS[name]) for name, content in draw(info, trials).items()],
        failed=[trial for trial in trials if trial.state == "failed"],
        method=METHOD,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(page + "\n", path)


def markdown(info: StudyInfo, trials: Sequence[Trial]) -> str:
    """The verdicts and tables for the terminal."""
    parts = [f"### {title}\n\n{tables.markdown(cells)}" for title, cells in sections(info, trials)]
    failed = [f"- {trial.name} FAILED: {trial.message}" for trial in trials if trial.state == "failed"]
    return "\n\n".join(["\n".join(verdicts(info, trials)), *parts, METHOD, "\n".join(failed)]).strip()


def sections(info: StudyInfo, trials: Sequence[Trial]) -> list[tuple[str, tables.Cells]]:
    """Title and cells of each table that has a row."""
    found = [
        ("Settings", tables.setting_table(info, trials)),
        ("Compared methods", tables.method_table(trials)),
        ("PPO and the alternatives at equal KL", tables.lead_table(trials)),
        ("Trials", tables.trial_table(trials)),
    ]
    return [(title, cells) for title, cells in found if len(cells) > 1]


def verdicts(info: StudyInfo, trials: Sequence[Trial]) -> list[str]:
    """A sentence on the best setting, without and with the constraint."""
    if info.objective is None:
        return []
    word = "Highest" if info.maximise else "Lowest"
    lines = [_verdict(f"{word} {info.objective}", tables.best(info, trials, constrained=False))]
    if info.constraint:
        found = tables.best(info, trials, constrained=True)
        lines.append(_verdict(f"{word} {info.objective} where {info.constraint}", found))
    missing = tables.unmeasured(info, [trial for trial in trials if trial.state == "finished"])
    return [*lines, *([f"Without a value: {missing}"] if missing else [])]


def _verdict(what: str, best: tables.Best | None) -> str:
    if best is None:
        return f"{what}: no setting yet."
    line = f"{what}: {best.setting}, {tables.text(best.value)}."
    if not best.second:
        return line
    return (
        line
        + (" Its interval and " if best.separated else " Not separated: its interval and ")
        + (f"that of {best.second}, the second, {'are apart' if best.separated else 'overlap'}.")
    )


def draw(info: StudyInfo, trials: Sequence[Trial]) -> dict[str, bytes]:
    """The pictures; none where no trial has snapshots with a gold score."""
    groups = tables.by_setting(trials)
    chosen = set(groups)
    if len(groups) > MOST_DRAWN and info.objective:
        read = tables.objective_of(info.objective)
        means = {name: found.mean for name, group in groups.items() if (found := tables.summary(group, read))}
        chosen = set(sorted(means, key=means.__getitem__, reverse=info.maximise)[:MOST_DRAWN])
    runs: Runs = {
        (trial.seed, name): trial
        for name, group in groups.items()
        if name in chosen
        for trial in group
        if frontier_points(trial, "gold") and snapshot_costs(trial)
    }
    return pictures.draw(runs) if runs else {}


def embed(content: bytes) -> str:
    """A picture as an address."""
    return f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
