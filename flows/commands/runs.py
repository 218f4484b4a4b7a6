"""`leash runs`: the runs that are known here, the newest first, each with its main figures and the parameters that
differ from the run before it."""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.commands.compare.sources import EVALUATION, comparable, find, git, runs_in_mlflow
from flows.text import shorten, table
from rlhf_core.errors import UserError
from tasks.page.wording import MISSING, number, percent
from tasks.params.loader import PARAMS_FILE, parse_yaml, with_derived
from tasks.summary import SUMMARY
from tasks.tracking.record import flatten

FIGURES = {"gold": "gold_policy", "win_rate": "win_rate", "kl": "kl_per_sequence"}
"""Name here -> name in metrics/summary.json and on a pipeline run in MLflow."""
MOST_NAMES = 3
MORE = 3
"""Commits that are read for each run that is listed: some have equal results."""
NARROWEST = 80


@dataclass
class Run:
    """One run: names that `leash compare` accepts, the end of the run or its commit, parameters (None: not known)."""

    names: list[str]
    date: datetime
    params: Mapping[str, str] | None
    metrics: Mapping[str, Any]

    @property
    def figures(self) -> dict[str, float | None]:
        """The main figures."""
        return {name: self.metrics.get(key) for name, key in FIGURES.items()}


def listed(root: Path, most: int) -> list[dict[str, Any]]:
    """The newest `most` runs, for `--json`: `changes` has [before, now] of each parameter that differs from the next
    older run, `kl` is in nats per answer. Runs with equal figures and parameters are one with several names."""
    runs: list[Run] = []
    for run in sorted((*_here(root, MORE * most), *_mlflow(root)), key=lambda run: run.date, reverse=True):
        same = (one for one in runs if one.figures == run.figures and one.params == run.params)
        if any(run.figures.values()) and (known := next(same, None)):
            known.names += run.names
        else:
            runs.append(run)
    rows = []
    for place, run in enumerate(runs[:most]):
        old, new = runs[place + 1].params if place + 1 < len(runs) else None, run.params
        changes = None
        if old is not None and new is not None:
            changes = {key: [old.get(key), new.get(key)] for key in {**new, **old} if old.get(key) != new.get(key)}
        row = {"names": list(dict.fromkeys(run.names)), "date": run.date.isoformat(timespec="seconds")}
        rows.append(row | {"changes": changes} | run.figures)
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    """The table."""
    if not rows:
        return f"no run yet: no {SUMMARY} here, in git, in an experiment or in MLflow"
    lines = [("run", "date", "gold", "win rate", "KL, nats", "changed from the run below")]
    for row in rows:
        changes = [
            f"{key} {' → '.join(MISSING if value is None else shorten(value, 20) for value in values)}"
            for key, values in (row["changes"] or {}).items()
        ]
        text = "" if row["changes"] is None else ", ".join(changes) or "nothing"
        figures = (number(row["gold"], 2), percent(row["win_rate"], 1), number(row["kl"], 2))
        date = datetime.fromisoformat(row["date"]).astimezone().strftime("%Y-%m-%d %H:%M")
        lines.append((" ".join(row["names"][:MOST_NAMES]), date, *figures, text))
    width = max(NARROWEST, shutil.get_terminal_size((120, 24)).columns)
    return "\n".join(shorten(line, width) for line in table(lines).splitlines())


def _here(root: Path, most: int) -> Iterator[Run]:
    """This checkout, the commits of this branch that changed the figures, and DVC's experiments."""
    path = root / EVALUATION
    if path.is_file():
        with suppress(UserError):  # metrics of an older version, or half-written
            run = find(root, ".")
            yield Run(["."], datetime.fromtimestamp(path.stat().st_mtime, UTC), run.params, run.evaluation)
    log = git(root, "log", f"--max-count={most}", "--format=%H %h %cI", "--", SUMMARY, EVALUATION)
    words = ("--sort=-committerdate", f"--count={most}")
    form = "--format=%(objectname) %(refname:lstrip=4) %(committerdate:iso-strict)"
    experiments = git(root, "for-each-ref", *words, form, "refs/exps/*/*/*")
    for line in (*log.splitlines(), *experiments.splitlines()):
        commit, name, date = line.split()
        with suppress(ValueError, UserError):  # a commit without a result
            text = git(root, "show", f"{commit}:./{SUMMARY}") or git(root, "show", f"{commit}:./{EVALUATION}")  # older
            metrics = json.loads(text)
            params = parse_yaml(git(root, "show", f"{commit}:./{PARAMS_FILE}"), Path(PARAMS_FILE))
            yield Run([name], datetime.fromisoformat(date), comparable(flatten(with_derived(params))), metrics)


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
            yield Run([name], date, comparable(run.data.params), run.data.metrics)
