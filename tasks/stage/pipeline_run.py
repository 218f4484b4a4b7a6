"""The pipeline run in MLflow: the figures of all stages, links to the runs of restored ones, and its end."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE, parse, read_yaml
from tasks.params.runtime import RuntimeParams
from tasks.stage.definition import Definition, pipeline_identity
from tasks.stage.dvc_adapter import Project, open_project
from tasks.tracking.sender import drain
from tasks.tracking.tracker import PipelineTracker, Status, Tracker

OF_A_MODEL = ("gold", "reward", "win_rate", "kl")
"""The figures of each compared model on MLflow's page; with all figures, nothing would be found."""


def headline_numbers(stage: str, metrics: dict[str, Any]) -> dict[str, float | None]:
    """The numbers of metrics/<stage>.json, named `<stage>/<name>`, and `<stage>/<model>.<name>` for compared models."""
    found = dict(metrics)
    for model, figures in (metrics.get("models") or {}).items():
        found |= {f"{model}.{name}": figures.get(name) for name in OF_A_MODEL}
    numbers = {k: v for k, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {f"{stage}/{name}": float(value) for name, value in numbers.items()}


def describe(
    tracker: PipelineTracker | Tracker, project: Project, params: dict[str, Any], stages: Iterable[str] | None = None
) -> None:
    """Show the figures of `stages` (None: all) on the pipeline run, and link the runs of those that DVC restored."""
    known = [stage.name for stage in project.stages]
    for name in known if stages is None else [name for name in known if name in set(stages)]:
        metrics = project.root / "metrics" / f"{name}.json"
        if not metrics.exists():
            continue
        tracker.headline(headline_numbers(name, json.loads(metrics.read_text(encoding="utf-8"))))
        definition = Definition(name, project)
        with suppress(UserError):  # an input is missing, and its hash with it
            tracker.link_restored(name, definition.key(params, definition.hashes()))


def finish(root: Path, status: Status, stages: Sequence[str], seconds: Mapping[str, float]) -> str:
    """Describe and close the pipeline run, and send to MLflow what it has not received. Returns a line about what is
    left; empty where nothing is.

    `stages` are those with results of this run, `seconds` their times. The run gets tags with the paths of report and
    models. Does nothing where params.yaml cannot be read or `runtime.tracking` is off; without stages it only sends.
    """
    try:
        params = read_yaml(root / PARAMS_FILE)
        tracking = parse(RuntimeParams, params.get("runtime", {}), "runtime").tracking
    except UserError:
        return ""
    if not tracking:
        return ""
    if stages:
        places = {"leash.report": str(root / "report" / "index.html"), "leash.models": str(root / "models")}
        with open_project(root) as project:
            tracker = PipelineTracker.open(root, pipeline_identity(project, params), tags=places)
            describe(tracker, project, params, stages)
            tracker.headline({f"seconds/{stage}": round(took, 1) for stage, took in seconds.items()})
            tracker.close_parent(status)
            tracker.close()
    return str(drain(root))
