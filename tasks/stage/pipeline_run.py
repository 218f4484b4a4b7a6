"""The pipeline run in MLflow as a whole: which results belong to it, whoever made them, and that it has ended.

A stage that DVC restored made no run of its own under this pipeline run; its figures are shown here, its maker linked.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dvc.repo import Repo

from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE, parse, read_yaml
from tasks.params.runtime import RuntimeParams
from tasks.stage.definition import Definition, executable, pipeline_identity
from tasks.tracking.sender import drain
from tasks.tracking.tracker import PipelineTracker, Status, Tracker

OF_A_MODEL = ("gold", "reward", "win_rate", "kl")
"""What of each compared model MLflow's compare page shows; all of it would hide the rest."""


def headline_numbers(stage: str, metrics: dict[str, Any]) -> dict[str, float | None]:
    """The numbers of metrics/<stage>.json, named `<stage>/<name>`, and `<stage>/<model>.<name>` for compared models."""
    found = dict(metrics)
    for model, figures in (metrics.get("models") or {}).items():
        found |= {f"{model}.{name}": figures.get(name) for name in OF_A_MODEL}
    numbers = {k: v for k, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {f"{stage}/{name}": float(value) for name, value in numbers.items()}


def describe(
    tracker: PipelineTracker | Tracker, repo: Repo, params: dict[str, Any], stages: Iterable[str] | None = None
) -> None:
    """Show the figures of `stages` (None: all) on the pipeline run, and link the runs of those that DVC restored."""
    known = [stage.name for stage in executable(repo)]
    for name in known if stages is None else [name for name in known if name in set(stages)]:
        metrics = Path(repo.root_dir) / "metrics" / f"{name}.json"
        if not metrics.exists():
            continue
        tracker.headline(headline_numbers(name, json.loads(metrics.read_text(encoding="utf-8"))))
        definition = Definition(name, repo)
        with suppress(UserError):  # an input is gone; what it once was is not known here
            tracker.link_restored(name, definition.key(params, definition.hashes()))


def finish(root: Path, status: Status, stages: Sequence[str], seconds: Mapping[str, float]) -> str:
    """Describe and close the pipeline run, and send to MLflow what it has not received. Returns what is left, in words.

    For the driver of the graph; `stages` are those whose results are those of this run, `seconds` how long each took.
    The run also gets a tag with the places of report and models. Nothing is described where
    none is, where params.yaml is refused (that is the stages' to say), or where `runtime.tracking` is off.
    """
    try:
        params = read_yaml(root / PARAMS_FILE)
        tracking = parse(RuntimeParams, params.get("runtime", {}), "runtime").tracking
    except UserError:
        return ""
    if not tracking:
        return ""
    if stages:
        with Repo(str(root)) as repo:
            places = {"leash.report": str(root / "report" / "index.html"), "leash.models": str(root / "models")}
            tracker = PipelineTracker.open(root, pipeline_identity(repo, params), tags=places)
            describe(tracker, repo, params, stages)
            tracker.headline({f"seconds/{stage}": round(took, 1) for stage, took in seconds.items()})
            tracker.close_parent(status)
            tracker.close()
    drained = drain(root)
    return f"{drained.left} events wait in work/outbox for MLflow ({drained.reason})" if drained.left else ""
