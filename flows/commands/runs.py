"""`leash runs`: the runs that are known here, the newest first, each with its main figures and the parameters that
differ from the run before it."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.commands.compare.sources import EVALUATION, comparable, find, git, runs_in_mlflow
from flows.text import shorten, table
from rlhf_core.errors import UserError
from tasks.page.wording import MISSING, number, percent
from tasks.params.loader import PARAMS_FILE, parse_yaml, with_derived
from tasks.tracking.record import flatten

FIGURES = {"gold": "gold_policy", "win_rate": "win_rate", "kl": "kl_per_sequence"}
"""Name here -> name in metrics/evaluate.json and on a pipeline run in MLflow."""
EXPERIMENTS = "refs/exps/"
MOST_NAMES = 3
MORE = 3
"""Commits that are read for each run that is listed: some have equal results."""
NARROWEST = 80


@dataclass(frozen=True)
class Run:
    """One run: names that `leash compare` accepts, the end of the run or its commit, parameters (None: not known)."""

    names: tuple[str, ...]
    date: datetime
    params: Mapping[str, str] | None
    figures: Mapping[str, float | None]


def listed(root: Path, most: int) -> list[dict[str, Any]]:
    """The newest `most` runs, for `--json`: `changes` has [before, now] of each parameter that differs from the next
    older run, `kl` is in nats per answer. Runs with equal figures and parameters are one with several names."""
    found: list[Run] = []
    everything = (*_checkout(root), *_commits(root, MORE * most), *_experiments(root, MORE * most), *_mlflow(root))
    for run in sorted(everything, key=lambda run: run.date, reverse=True):
        same = (place for place, one in enumerate(found) if one.figures == run.figures and one.params == run.params)
        if (place := next(same, None)) is None or not any(run.figures.values()):
            found.append(run)
        else:
            found[place] = replace(found[place], names=(*found[place].names, *run.names))
    rows = []
    for run, before in zip(found, [*found[1:], None], strict=False):  # the last has none before it
        row = {"names": list(dict.fromkeys(run.names)), "date": run.date.isoformat(timespec="seconds")}
        rows.append(row | {"changes": _changes(before, run)} | dict(run.figures))
    return rows[:most]


def render(rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [("run", "date", "gold", "win rate", "KL, nats", "changed from the run below")]
    for row in rows:
        changes = row["changes"]
        words = [f"{key} {_word(before)} → {_word(now)}" for key, (before, now) in (changes or {}).items()]
        text = "" if changes is None else ", ".join(words) or "nothing"
        figures = (number(row["gold"], 2), percent(row["win_rate"], 1), number(row["kl"], 2))
        date = datetime.fromisoformat(row["date"]).astimezone().strftime("%Y-%m-%d %H:%M")
        lines.append((" ".join(row["names"][:MOST_NAMES]), date, *figures, text))
    if not rows:
        return "no run yet: no metrics/evaluate.json here, in git, in an experiment or in MLflow"
    width = max(NARROWEST, shutil.get_terminal_size((120, 24)).columns)
    return "\n".join(shorten(line, width) for line in table(lines).splitlines())


def _word(value: str | None) -> str:
    return MISSING if value is None else shorten(value, 20)


def _changes(before: Run | None, now: Run) -> dict[str, list[str | None]] | None:
    """None where there is no run before, or the parameters of one are not known."""
    if before is None or before.params is None or now.params is None:
        return None
    old, new = before.params, now.params
    return {key: [old.get(key), new.get(key)] for key in {**new, **old} if old.get(key) != new.get(key)}


def _checkout(root: Path) -> Iterator[Run]:
    path = root / EVALUATION
    if path.is_file():
        try:
            run = find(root, ".")
        except UserError:
            return  # metrics of an older version, or half-written
        date = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        yield Run((".",), date, run.params, _figures(run.evaluation))


def _commits(root: Path, most: int) -> Iterator[Run]:
    """Commits of this branch that changed the metrics."""
    log = git(root, "log", f"--max-count={most}", "--format=%H %h %cI", "--", EVALUATION)
    for line in log.splitlines():
        commit, short, date = line.split()
        yield from _of_commit(root, commit, short, date)


def _experiments(root: Path, most: int) -> Iterator[Run]:
    words = (
        "--sort=-committerdate",
        f"--count={most}",
        "--format=%(objectname) %(refname) %(committerdate:iso-strict)",
    )
    for line in git(root, "for-each-ref", *words, f"{EXPERIMENTS}*/*/*").splitlines():
        commit, ref, date = line.split()
        yield from _of_commit(root, commit, ref.rpartition("/")[2], date)


def _of_commit(root: Path, commit: str, name: str, date: str) -> Iterator[Run]:
    try:
        evaluation = json.loads(git(root, "show", f"{commit}:./{EVALUATION}"))
        params = parse_yaml(git(root, "show", f"{commit}:./{PARAMS_FILE}"), Path(PARAMS_FILE))
    except (ValueError, UserError):
        return  # a commit without a result
    yield Run((name,), datetime.fromisoformat(date), comparable(flatten(with_derived(params))), _figures(evaluation))


def _mlflow(root: Path) -> Iterator[Run]:
    """Pipeline runs that have been evaluated. A run of an experiment has its name."""
    runs, where = runs_in_mlflow(root)
    if "does not answer" in where:
        print(f"left out: {where}", file=sys.stderr, flush=True)
    for run in runs:
        tags = run.data.tags
        if "leash.stage" not in tags and any(key in run.data.metrics for key in FIGURES.values()):
            date = datetime.fromtimestamp((run.info.end_time or run.info.start_time) / 1000, UTC)
            name = tags.get("leash.experiment") or run.info.run_id[:8]
            yield Run((name,), date, comparable(run.data.params), _figures(run.data.metrics))


def _figures(found: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: found.get(key) for name, key in FIGURES.items()}
