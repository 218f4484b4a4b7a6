"""The Prefect artifacts of a run: its progress, the final metrics, where the report is, and the run in MLflow."""

import html
import json
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from flows.text import dotted
from tasks import summary
from tasks.stage.definition import git_state
from tasks.stage.pipeline_run import run_url
from tasks.tracking.settings import RUN_VARIABLE

ALERT = re.compile(r"\bALERT (?P<name>\w+).*")
"""An alert of PPO in the output of a stage."""


def metric_rows(root: Path) -> list[dict[str, str]]:
    """Every number of `metrics/*.json`, one row each: stage, metric (nested names joined by dots), value."""
    rows = []
    for path in sorted((root / "metrics").glob("*.json")):
        for name, value in dotted(json.loads(path.read_text(encoding="utf-8"))).items():
            rows.append({"stage": path.stem, "metric": name, "value": _text(value)})
    return rows


def report_page(root: Path) -> str:
    """Markdown: the commit, the places of report and models, and the headline figures when there is an evaluation."""
    commit, dirty = git_state(root)
    version = f"`{commit}`{', with uncommitted changes' if dirty else ''}" if commit else "none"
    lines = [
        "# Leash run",
        "",
        f"Commit: {version}",
        "",
    ]
    if name := os.environ.get(RUN_VARIABLE):  # its workspace will be removed
        lines += [f"DVC experiment: `{name}`; `dvc exp apply {name}` brings report and models", ""]
    else:
        lines += [f"Report: `{root / 'report' / 'index.html'}`", "", f"Models: `{root / 'models'}`", ""]
    file = root / "metrics" / "evaluate.json"  # a clone without results has the summary alone, which git keeps
    if file.exists() and (figures := summary.read(root)):
        evaluation = json.loads(file.read_text(encoding="utf-8"))
        lines += ["| | |", "|---|---|", f"| judge of the wins | {_as_markdown(str(evaluation['win_rate_judge']))} |"]
        lines += [f"| {summary.FIGURES.get(name, name)} | {_text(value)} |" for name, value in figures.items()]
    return "\n".join(lines) + "\n"


def announce_alert(stage: str, line: str) -> None:
    """Emit the Prefect event `leash.alert.NAME` where a stage prints that alert."""
    if match := ALERT.search(line):
        from prefect.events import emit_event

        name, text = match["name"], match[0].removeprefix("ALERT ")
        emit_event(f"leash.alert.{name}", {"prefect.resource.id": f"leash.stage.{stage}"}, payload={"alert": text})


def progress(description: str) -> Callable[[float], None]:
    """Create Prefect's artifact `leash-progress`; the function that it returns sends a percentage. A thread of its own
    does that: a lost server neither stops nor delays the run."""
    from prefect.artifacts import create_progress_artifact, update_progress_artifact

    try:
        artifact = cast(UUID, create_progress_artifact(0.0, key="leash-progress", description=description))
    except Exception:
        return lambda percent: None

    def send(percent: float) -> None:
        with suppress(Exception):
            update_progress_artifact(artifact, percent)

    def show(percent: float) -> None:
        thread = threading.Thread(target=send, args=(percent,), daemon=True)
        thread.start()
        if percent >= 100.0:
            thread.join(timeout=5.0)

    return show


def publish(root: Path) -> None:
    """Create the artifacts `leash-metrics` and `leash-report`, and `leash-mlflow` where MLflow is a server. Call it
    inside a flow run."""
    from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

    rows = metric_rows(root)
    if rows:
        create_table_artifact(key="leash-metrics", table=rows, description="Final metrics of the run")
    create_markdown_artifact(key="leash-report", markdown=report_page(root), description="Where the results are")
    if url := run_url(root):
        create_link_artifact(link=url, link_text="Run in MLflow", key="leash-mlflow")


def _as_markdown(text: str) -> str:
    """The text escaped: Prefect's page shows it as it is, without HTML, links or further cells."""
    return re.sub(r"([\\`*_{}\[\]()#+!|~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)
