"""The pipeline run in MLflow: the figures of all stages, links to the runs of restored ones, and its end."""

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError
from tasks import summary
from tasks.params.loader import PARAMS_FILE, parse, read_yaml
from tasks.params.runtime import RuntimeParams
from tasks.stage.definition import RAW, Definition, pipeline_identity
from tasks.stage.dvc_files import Project, open_project
from tasks.tracking.sender import drain
from tasks.tracking.settings import RUN_VARIABLE
from tasks.tracking.tracker import PipelineTracker, Status, Tracker

OF_A_MODEL = ("gold", "reward", "win_rate", "kl", "response_tokens", "missing_eos_share", "heldout_loss")
"""The figures of each model in MLflow's list of models."""
DATASETS = {
    RAW: ("raw", "raw data"),
    "data/ingest/ppo_prompts.jsonl": ("ppo_prompts", "training"),
    "data/ingest/heldout.jsonl": ("heldout", "evaluation"),
}
"""Path -> name and context of the datasets of the pipeline run."""


def numbers(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers of metrics/<stage>.json, without those in lists and blocks."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}


@dataclass(frozen=True)
class ModelFigures:
    """A model with its figures; `step` orders the models of a stage."""

    name: str
    kind: str
    step: int
    figures: dict[str, float | None]


def models_of(stage: str, root: Path, metrics: Mapping[str, Any]) -> list[ModelFigures]:
    """The models that a stage has measured: those of the evaluation, with the policy last, or PPO's snapshots."""
    if stage == "evaluate":
        compared = metrics.get("models") or {}
        names = sorted(compared, key="policy".__eq__)
        return [ModelFigures(name, "model", step, _of_a_model(compared[name])) for step, name in enumerate(names)]
    if stage == "select":
        with (root / "plots/select.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["step"]) and float(row["eta"]) == 1]
        return [ModelFigures(f"snapshot {row['step']}", "snapshot", int(row["step"]), _of_a_model(row)) for row in rows]
    return []


def _of_a_model(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """Rounded: MLflow's list shows all digits."""
    found = {name: float(figures[name]) for name in OF_A_MODEL if figures.get(name) not in (None, "")}
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def report_results(
    tracker: Tracker, stage: str, root: Path, metrics: Mapping[str, Any], hashes: Mapping[str, str]
) -> None:
    """Log the figures of a stage that has ended on its run, and its models; those of the evaluation also as headline of
    the pipeline run. `describe` adds the others: MLflow's comparison starts with the metric that a run got first, which
    should be one of PPO's."""
    models = models_of(stage, root, metrics)
    of_models = {name for model in models for name in model.figures}
    if stage == "evaluate":
        tracker.headline(summary.read(root))
    tracker.figures({name: value for name, value in numbers(metrics).items() if name not in of_models})
    for one in models:
        tracker.model(one.name, one.kind, one.figures, one.step, hashes.get(f"models/{one.name}", ""))


def describe(
    tracker: PipelineTracker | Tracker, project: Project, params: dict[str, Any], stages: Iterable[str] | None = None
) -> None:
    """Show the figures of `stages` (None: all) on the pipeline run, with its datasets, description and report, and link
    the runs of those that DVC restored."""
    known = [stage.name for stage in project.stages]
    wanted = known if stages is None else [name for name in known if name in set(stages)]
    headline = summary.read(project.root) if "evaluate" in wanted else {}
    for name in wanted:
        if not (project.root / "metrics" / f"{name}.json").exists():
            continue
        definition = Definition(name, project)
        with suppress(UserError):  # an input is missing, and its hash with it
            tracker.link_restored(name, definition.key(params, definition.hashes()))
    tracker.headline(headline)
    files = {file.path: file for stage in project.stages for file in stage.inputs if file.path in DATASETS}
    for path, file in files.items():
        if file.exists:
            name, context = DATASETS[path]
            tracker.dataset(name, path, file.known_hash(), context)
    report = project.root / "report" / "index.html"
    noted = {name: value for name, value in headline.items() if not name.endswith(("_low", "_high"))}
    tracker.describe(noted, report if "report" in wanted and report.is_file() else None)


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
        if name := os.environ.get(RUN_VARIABLE):  # its workspace will be removed
            places = {"leash.experiment": name}
        with open_project(root) as project:
            tracker = PipelineTracker.open(root, pipeline_identity(project, params), tags=places)
            describe(tracker, project, params, stages)
            tracker.seconds(seconds)
            tracker.close_parent(status)
            tracker.close()
    return str(drain(root))
