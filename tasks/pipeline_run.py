"""The pipeline run in MLflow as a whole: which results belong to it, whoever made them, and that it has ended.

A stage that DVC restored made no run of its own under this pipeline run; its figures are shown here, its maker linked.
"""

import json
from pathlib import Path
from typing import Any

from dvc.repo import Repo

from rlhf_core.errors import UserError
from tasks.definition import Definition, executable, pipeline_identity
from tasks.params.loader import read_yaml
from tasks.params.runtime import RuntimeParams
from tasks.tracking.sender import drain
from tasks.tracking.tracker import PipelineTracker, Status, Tracker


def headline_numbers(stage: str, metrics: dict[str, Any]) -> dict[str, float | None]:
    """The numbers of metrics/<stage>.json, named `<stage>/<name>`."""
    numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {f"{stage}/{name}": float(value) for name, value in numbers.items()}


def describe(tracker: PipelineTracker | Tracker, repo: Repo, params: dict[str, Any]) -> None:
    """Show every stage's figures on the pipeline run, and link the runs of stages that DVC restored."""
    for stage in executable(repo):
        definition = Definition(stage.addressing, repo)
        metrics = Path(repo.root_dir) / "metrics" / f"{definition.name}.json"
        if metrics.exists():
            tracker.headline(headline_numbers(definition.name, json.loads(metrics.read_text(encoding="utf-8"))))
            try:
                tracker.link_restored(definition.name, definition.key(params, definition.hashes()))
            except UserError:
                continue  # an input is gone; what it once was is not known here


def finish(root: Path, status: Status) -> str:
    """Describe and close the pipeline run, and send to MLflow what it has not received. Returns what is left, in words.

    For the driver of the whole graph; does nothing where `runtime.tracking` is off.
    """
    params = read_yaml(root / "params.yaml")
    if not RuntimeParams.model_validate(params.get("runtime", {})).tracking:
        return ""
    with Repo(str(root)) as repo:
        tracker = PipelineTracker.open(root, pipeline_identity(repo, params))
        describe(tracker, repo, params)
        tracker.close_parent(status)
        tracker.close()
    drained = drain(root)
    return f"{drained.left} events wait in work/outbox for MLflow ({drained.reason})" if drained.left else ""
