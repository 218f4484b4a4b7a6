"""Makes MLflow agree with the records in `work/tracking`: a run for each pipeline and, nested, one for each stage key;
points by step, figures, tables, files, the registered policy.

A second call makes nothing, and a call after one that was killed makes what is missing. Only this module of `tasks`
imports mlflow, which takes seconds; it runs in processes of its own (see `main`).
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS, MLFLOW_MODEL_IS_EXTERNAL, MLFLOW_MODEL_VERSIONS

from rlhf_core.data.chat import as_text
from rlhf_core.locks import FileLock
from tasks import naming
from tasks.datasets.jsonl import read_jsonl
from tasks.tracking import record, settings, titles

LOCK_SECONDS = 30.0
PAUSE_SECONDS = 5.0
REFUSED = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED",
           "PERMISSION_DENIED", "BAD_REQUEST", "FEATURE_DISABLED", "NOT_FOUND")  # fmt: skip
"""Codes of MLflow for one thing that it does not take; all other errors mean that it cannot be reached now."""
CURVES = tuple(f"ppo/{name}" for name in ("gold", "reward_raw", "kl", "entropy", "response_tokens_mean", "value_loss"))
"""Points of PPO that the pipeline's run has, too: the curves by which one compares runs, best first."""
OF_A_MODEL = ("gold", "reward", "win_rate", "kl", "response_tokens", "missing_eos_share", "heldout_loss")
"""The figures of each model in MLflow's list of models."""
PROMPTS = {"evaluate": "data/ingest/evaluation_prompts.jsonl", "select": "data/ingest/preference_prompts.jsonl"}
"""The prompts on which a stage measures models."""
DATASETS = {"data/raw": "raw data", "data/ingest/ppo_prompts.jsonl": "training", PROMPTS["evaluate"]: "evaluation"}
"""Path -> context of the datasets of the pipeline's run."""
TABLE_ROWS = 100
"""Of the preferences, of which there may be very many; the other tables have few rows."""
NOTE, REPORT, MISSING, SENT = "mlflow.note.content", "report/index.html", "leash.missing", "leash.files"
SECONDS = "leash.seconds"
"""Tag of a stage's run: how long it took."""
MODEL_NOTE = 'Policies. A version loads with `mlflow.pyfunc.load_model("models:/{0}/1")` or `mlflow.transformers`.'

for _name in ("urllib3.connectionpool", "alembic"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class Unreachable(Exception):
    """MLflow cannot be reached now."""


def export(root: Path, uri: str | None = None, records: Sequence[Path] | None = None) -> list[str]:
    """Make MLflow agree with the records of `root` (None: all of them), and remove those that have arrived. Returns a
    line for each thing that MLflow refused, which the next call tries again. Raises Unreachable."""
    settings.prepare_environment()
    uri = uri or settings.tracking_uri(root)
    mark, missing, failures = settings.uri_mark(uri), list[str](), list[str]()
    lock = FileLock(record.folder_of(root).parent / "mlflow.lock")
    if not record.folder_of(root).is_dir():
        return []
    if not lock.acquire(LOCK_SECONDS):
        raise Unreachable("another process sends to it")
    try:
        with _reached():
            exporter = Exporter(root, uri)
        for folder in record.pending(root) if records is None else records:
            exporter.missing, seen = [], record.fingerprint(folder)
            try:
                with _reached():
                    running = exporter.record(folder)
                if not exporter.missing and not running:
                    record.write(folder / record.SENT, {**record.read(folder / record.SENT), mark: seen})
            except Unreachable as error:
                failures.append(f"{folder.name}: {error}")
                if len(failures) > 1 and settings.unreachable(uri):  # one that fails does not stop the others
                    raise
            missing += exporter.missing
        record.prune(root, mark)
    finally:
        lock.release()
    return failures + missing


class Exporter:
    """A connection to the project's experiment at one address."""

    def __init__(self, root: Path, uri: str) -> None:
        self.missing: list[str] = []
        self._root = root
        _make_database(uri)
        self._client = MlflowClient(uri, os.environ.get("MLFLOW_REGISTRY_URI") or uri)
        name = naming.experiment_name(root)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None and experiment.lifecycle_stage == "deleted":
            self._client.restore_experiment(experiment.experiment_id)
        place = settings.artifact_location(root, uri)
        self._experiment = experiment.experiment_id if experiment else self._client.create_experiment(name, place)

    def record(self, folder: Path) -> bool:
        """Show a record; whether a stage of it is running."""
        is_study = record.read(folder / record.RUN).get("kind") == "study"
        return self.study(folder) if is_study else self.pipeline(folder)

    # The pipeline's run.

    def pipeline(self, folder: Path) -> bool:
        """Show a pipeline run and its stages; whether a stage of it is running."""
        run, stages = record.read(folder / record.RUN), record.executions(folder)
        if not stages:
            return False
        running = any(stage["status"] == "RUNNING" for stage in stages)
        parent = self._open(run, stages)
        run_id = parent.info.run_id
        known = {child.data.tags.get("leash.stage_key"): child for child in self._search(
            f"tags.mlflow.parentRunId = '{run_id}'", most=1000)}  # fmt: skip
        newest: dict[str, dict[str, Any]] = {}
        with self._noting(parent):
            for stage in stages:
                newest[stage["stage"]] = stage
                child = known.get(stage["key"])
                if stage.get("restored"):
                    if child is not None and child.info.status == "FINISHED":
                        continue  # this run has executed it
                    same = f"tags.`leash.stage_key` = '{stage['key']}' and attributes.status = 'FINISHED'"
                    if maker := self._search(same):
                        self._tags(parent, {f"leash.restored.{stage['stage']}": maker[0].info.run_id})
                        continue
                known[stage["key"]] = self.stage(parent, child, stage, run)
            self._conclude(parent, run, newest)
            self._seconds(parent, stages)
        states = {stage["status"] for stage in newest.values()} - {"FINISHED"}
        status = "RUNNING" if running else min(states, default="FINISHED")
        executed = [stage for stage in stages if not stage.get("restored")]
        if executed or parent.info.status == "RUNNING":
            self._status(parent, status, max(s.get("ended") or s["started"] for s in executed or stages))
        return running

    def _seconds(self, parent: Run, stages: Sequence[Mapping[str, Any]]) -> None:
        """Log the seconds of all stages that the pipeline's run has executed, also in records that are gone."""
        if any(not stage.get("restored") for stage in stages):
            children = self._search(f"tags.mlflow.parentRunId = '{parent.info.run_id}'", most=1000)
            took = [float(child.data.tags.get(SECONDS, 0)) for child in children]
            self._figures(parent, {"seconds": round(sum(took), 1)}, max(s["started"] for s in stages))

    def _open(self, run: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> Run:
        """The run of the pipeline with its parameters and tags; created where there is none."""
        same = f"tags.`leash.pipeline_key` = '{run['key']}' and tags.`leash.workspace` = '{run['workspace']}'"
        found = self._search(same)
        started = min(stage["started"] for stage in stages)
        tags = run["tags"] | {"leash.pipeline_key": run["key"], "leash.workspace": run["workspace"]}
        if run.get("study"):
            tags |= {"leash.study": run["study"], "mlflow.parentRunId": self._study_run(run["study"]).info.run_id}
        if found:
            parent = found[0]
        else:
            before = self._before(started)
            title = run.get("experiment") or titles.title(run, before and before.data)
            parent = self._client.create_run(self._experiment, started, tags, title)
        if not found or any(not stage.get("restored") for stage in stages):  # else the commit is one of a later time
            self._tags(parent, tags)
        self._params(parent, run["params"])
        return parent

    def _before(self, started: int) -> Run | None:
        """The pipeline run of the experiment before this time that is no trial of a study."""
        query = f"attributes.start_time < {started} and tags.`leash.pipeline_key` LIKE '%'"
        return next((run for run in self._search(query, most=50) if "leash.study" not in run.data.tags), None)

    def _conclude(self, parent: Run, run: Mapping[str, Any], newest: Mapping[str, Mapping[str, Any]]) -> None:
        """Figures, curves, datasets, tables, models, policy and description of the pipeline's run."""
        figures = titles.headline({name: stage["folder"] for name, stage in newest.items()})
        at = max(stage.get("ended") or stage["started"] for stage in newest.values())
        ppo = newest.get("ppo")
        if ppo is not None:
            self._log_points(parent, ppo["key"][:8], [point for point in _points(ppo) if point[0] in CURVES])
        self._figures(parent, figures, at)
        inputs = {path: digest for stage in newest.values() for path, digest in stage["inputs"].items()}
        kept = {path: digest for path, digest in inputs.items() if path in DATASETS or path.startswith("data/raw/")}
        self._inputs(parent, kept, "raw data")
        for stage in newest.values():
            for name, rows in _tables(stage).items():
                self._table(parent, name, rows)
        report = newest["report"]["folder"] / record.FILES / REPORT if "report" in newest else None
        if report and report.is_file():
            self._file(parent, report, REPORT)
        note = titles.note(run, self._before(parent.info.start_time), figures)
        if report and report.is_file():
            note += f"; [report]({self._page(parent.info.run_id, REPORT)})"
        if not parent.data.tags.get(NOTE) or any(not stage.get("restored") for stage in newest.values()):
            self._describe(parent, note)
        evaluated = newest.get("evaluate")
        if evaluated and evaluated["status"] == "FINISHED" and (digest := evaluated["inputs"].get("models/policy")):
            self._part(parent, "registered policy", lambda: self._register(parent, run, evaluated, digest, figures))

    # A stage's run.

    def stage(self, parent: Run, child: Run | None, stage: Mapping[str, Any], run: Mapping[str, Any]) -> Run:
        """Show one execution of a stage."""
        points, tags = _points(stage), record.rows(stage["folder"])[1]
        named = ("mlflow.source.git.commit", "mlflow.source.git.branch", "mlflow.source.git.repoURL", "mlflow.user")
        tags = {name: text for name, text in run["tags"].items() if name in named} | tags
        tags |= {"mlflow.source.name": f"tasks.{stage['stage']}", "mlflow.source.type": "LOCAL"}
        tags |= {"leash.restarts": str(stage["restarts"])} if stage.get("restarts") else {}
        for file in (stage["folder"] / record.FILES / "data").rglob("*.jsonl"):  # by which the rows are found again
            digest = hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
            tags[settings.OUT_TAG + file.relative_to(stage["folder"] / record.FILES).as_posix()] = digest
        if stage.get("restored"):
            tags["leash.restored"] = "true"
        elif stage.get("ended"):
            tags[SECONDS] = f"{(stage['ended'] - stage['started']) / 1000:.1f}"
        identity = {"leash.stage": stage["stage"], "leash.stage_key": stage["key"],
                    "leash.workspace": run["workspace"], "mlflow.parentRunId": parent.info.run_id}  # fmt: skip
        if child is None:
            child = self._client.create_run(self._experiment, stage["started"], tags | identity, stage["stage"])
        with self._noting(child):
            self._params(child, stage["params"])
            self._tags(child, tags)
            self._inputs(child, {k: v for k, v in stage["inputs"].items() if k.startswith("data/")}, stage["stage"])
            self._log_points(child, "live" if (stage["folder"] / record.LIVE).exists() else "plot", points)
            if stage["status"] == "FINISHED":
                metrics = _metrics(stage)
                of_models = {name for *_, figures in _measured(stage) for name in figures}
                own = {k: v for k, v in titles.numbers(metrics).items() if k not in of_models}
                if of_models:
                    self._part(child, "models", lambda: self._models(parent, child, stage))
                self._figures(child, own, stage["ended"])
                for name, rows in _tables(stage).items():
                    self._table(child, name, rows)
                for file in sorted((stage["folder"] / record.FILES).rglob("*")):
                    place = file.relative_to(stage["folder"] / record.FILES).as_posix()
                    if file.is_file() and not place.startswith("data/"):
                        self._file(child, file, place)
        self._status(child, stage["status"], stage.get("ended") or stage["started"])
        return child

    def follow(self, folder: Path, stage: Mapping[str, Any]) -> str:
        """Show the new points of one running stage; the id of its run."""
        run = record.read(folder / record.RUN)
        parent = self._open(run, [stage])
        found = self._search(
            f"tags.`leash.stage_key` = '{stage['key']}' and tags.mlflow.parentRunId = '{parent.info.run_id}'"
        )
        self._status(parent, "RUNNING", 0)
        child = self.stage(parent, found[0] if found else None, stage, run)
        if stage["stage"] == "ppo":
            self._log_points(parent, stage["key"][:8], [point for point in _points(stage) if point[0] in CURVES])
        return str(child.info.run_id)

    # Studies.

    def study(self, folder: Path) -> bool:
        """Show the run of a study, which its trials are children of; whether it is running."""
        study = record.read(folder / record.RUN)
        run = self._study_run(study["study"])
        with self._noting(run):
            self._figures(run, study.get("metrics", {}), study["touched"])
            for file in sorted((folder / record.FILES).glob("*")):
                self._file(run, file, file.name)
        self._status(run, study["status"], study["touched"])
        return bool(study["status"] == "RUNNING")

    def _study_run(self, study: str) -> Run:
        found = self._search(f"tags.`leash.study_run` = '{study}'")
        tags = {"leash.study_run": study, "mlflow.source.name": "leash study"}
        return found[0] if found else self._client.create_run(self._experiment, tags=tags, run_name=study)

    # Models.

    def _models(self, parent: Run, child: Run, stage: Mapping[str, Any]) -> None:
        """The models that a stage has measured, in MLflow's list of models, of the pipeline's run; their metrics are
        those of the stage's run, and `step` orders the models of one stage."""
        query, prompts = f"source_run_id = '{parent.info.run_id}'", PROMPTS[stage["stage"]]
        known = {model.name: model for model in self._client.search_logged_models([self._experiment], query)}
        for name, kind, step, figures in _measured(stage):
            model = known.get(name)
            if model is None:
                digest = stage["inputs"].get(f"models/{name}", "")
                tags = {MLFLOW_MODEL_IS_EXTERNAL: "true"} | ({"leash.md5": digest} if digest else {})
                model = self._client.create_logged_model(
                    self._experiment, name, parent.info.run_id, tags, model_type=kind
                )
                self._client.log_outputs(parent.info.run_id, [LoggedModelOutput(model.model_id, step)])
                self._client.finalize_logged_model(model.model_id, "READY")
            have = {metric.key: metric.value for metric in model.metrics or []}
            place = {"model_id": model.model_id, "dataset_name": Path(prompts).stem,
                     "dataset_digest": stage["inputs"].get(prompts, "unknown")[:36]}  # fmt: skip
            new = [Metric(k, v, stage["ended"], step, **place) for k, v in figures.items() if have.get(k) != v]
            self._client.log_batch(child.info.run_id, metrics=new) if new else None

    def _register(
        self, parent: Run, run: Mapping[str, Any], stage: Mapping[str, Any], digest: str, figures: Mapping[str, float]
    ) -> None:
        """A version of the registered policy for its DVC hash. The newest policy, unless it is that of a trial or of a
        restored stage, gets the alias."""
        # MLflow 3.17: SQLite takes any source; a server takes dvc:// with or without run id, but no local path.
        name, alias = naming.model_name(self._root), settings.POLICY_ALIAS
        found = self._client.search_registered_models(f"name = '{name}'")
        if not found:
            self._client.create_registered_model(name, description=MODEL_NOTE.format(name))
        start = f"dvc://models/policy?md5={digest}"
        known = self._client.search_model_versions(f"name = '{name}' and source_path LIKE '{start}%'")
        if known:
            version = known[0]
        else:
            query = urlencode({"md5": digest, "project": settings.main_checkout(self._root).resolve()})
            tags = {key: f"{value:.6g}" for key, value in figures.items()}
            tags |= {"leash.report": f"runs:/{parent.info.run_id}/{REPORT}", "leash.made": str(stage["ended"])}
            tags |= {k: v for k, v in run["tags"].items() if k == "leash.commit"}
            pages = f"[run]({self._page(parent.info.run_id)}), [report]({self._page(parent.info.run_id, REPORT)})"
            note = f"{titles.note(run, self._before(parent.info.start_time), figures)}\n\n{pages}"
            version = self._client.create_model_version(
                name, f"dvc://models/policy?{query}", parent.info.run_id, tags, description=note, await_creation_for=0
            )
        aliased = found[0].aliases.get(alias) if found else None
        newest = int(self._client.get_model_version(name, aliased).tags.get("leash.made", 0)) if aliased else -1
        if aliased != version.version and stage["ended"] > newest and not run.get("study") and (
            newest < 0 or not stage.get("restored")):  # fmt: skip
            self._client.set_registered_model_alias(name, alias, version.version)
        query = f"source_run_id = '{parent.info.run_id}' AND name = 'policy'"
        if not known and (models := self._client.search_logged_models([self._experiment], query)):
            link = json.dumps([{"name": name, "version": str(version.version)}])
            self._client.set_logged_model_tags(models[0].model_id, {MLFLOW_MODEL_VERSIONS: link})

    # What all runs have.

    def _search(self, query: str, most: int = 1) -> list[Run]:
        """The newest runs of the experiment that match."""
        order = ["attributes.start_time DESC"]
        return list(self._client.search_runs([self._experiment], query, max_results=most, order_by=order))

    def _log_points(self, run: Run, source: str, points: Sequence[tuple[str, int, int, float]]) -> None:
        """Log the points that the run does not have. A tag counts those of this source that it has; a killed exporter
        may send up to 1,000 points twice, which MLflow's tables store once."""
        tag = "leash.points"
        name, _, count = run.data.tags.get(tag, "").partition(":")
        done = int(count) if name == source else 0
        for start in range(done, len(points), 1000):
            part = points[start : start + 1000]
            end = {tag: f"{source}:{start + len(part)}"}
            metrics = [Metric(key, value, at, step) for key, step, at, value in part]
            self._client.log_batch(run.info.run_id, metrics=metrics, tags=[RunTag(k, v) for k, v in end.items()])
            run.data.tags.update(end)

    def _figures(self, run: Run, figures: Mapping[str, float], at: int) -> None:
        """Log the figures that the run does not have with these values."""
        new = [Metric(record.safe_name(k), v, at, 0) for k, v in figures.items() if run.data.metrics.get(k) != v]
        if new:
            self._client.log_batch(run.info.run_id, metrics=new)

    def _params(self, run: Run, params: Mapping[str, str]) -> None:
        """Log the parameters that the run does not have: the first value of a name is kept."""
        new = [Param(name, text) for name, text in params.items() if name not in run.data.params]
        for start in range(0, len(new), 100):
            self._client.log_batch(run.info.run_id, params=new[start : start + 100])

    def _tags(self, run: Run, tags: Mapping[str, str]) -> None:
        """Set the tags that the run does not have with these values; the oldest parent wins."""
        named = {record.safe_name(name): str(text)[:5000] for name, text in tags.items()}
        new = {name: text for name, text in named.items() if run.data.tags.get(name) != text}
        if new:
            self._client.log_batch(run.info.run_id, tags=[RunTag(name, text) for name, text in new.items()])
            run.data.tags.update(new)

    def _inputs(self, run: Run, inputs: Mapping[str, str], context: str) -> None:
        """The datasets that a run reads, with their DVC hashes."""
        known = {(one.dataset.name, one.dataset.digest) for one in (run.inputs.dataset_inputs if run.inputs else [])}
        new = []
        for path, digest in inputs.items():
            if (Path(path).stem, digest[:36]) not in known:
                dataset = Dataset(Path(path).stem, digest[:36], "local", json.dumps({"uri": path}))
                new.append(DatasetInput(dataset, [InputTag("mlflow.data.context", DATASETS.get(path, context))]))
        if new:
            self._client.log_inputs(run.info.run_id, new)

    def _table(self, run: Run, name: str, rows: list[dict[str, Any]]) -> None:
        """A table for MLflow's evaluation view, which groups by the first column and compares runs by the second, and
        shows no nested runs: the pipeline's run has the tables, too."""
        columns = list(dict.fromkeys(column for row in rows[:1] for column in row))
        content = {"columns": columns, "data": [[_cell(row.get(column)) for column in columns] for row in rows]}
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(content, ensure_ascii=False, default=str), encoding="utf-8", errors="replace")
            if self._file(run, path, path.name):
                tables = json.loads(run.data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
                entry = {"path": path.name, "type": "table"}
                self._tags(run, {MLFLOW_LOGGED_ARTIFACTS: json.dumps([*tables, entry])} if entry not in tables else {})

    def _file(self, run: Run, path: Path, place: str) -> bool:
        """Upload a file as the artifact `place`, unless the run has it with this content. Whether it has it now: one
        that fails for whatever reason is noted, and all other things go on."""
        digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()[:8]
        sent = json.loads(run.data.tags.get(SENT, "{}"))
        if sent.get(place) == digest:
            return True
        folder = Path(place).parent.as_posix()
        try:
            self._client.log_artifact(run.info.run_id, str(path), None if folder == "." else folder)
        except Exception as error:
            self._note(run, place, error)
            return False
        self._tags(run, {SENT: json.dumps(sent | {place: digest})})
        return True

    def _part(self, run: Run, name: str, make: Callable[[], None]) -> None:
        """Call `make`; where the server refuses it, note that: older servers have no models, others no registry."""
        try:
            make()
        except MlflowException as error:
            if error.error_code not in REFUSED:
                raise
            self._note(run, name, error)

    @contextmanager
    def _noting(self, run: Run) -> Iterator[None]:
        """Afterwards a tag of the run lists what is missing."""
        before, self.missing = self.missing, []
        try:
            yield
            if self.missing or run.data.tags.get(MISSING):
                self._tags(run, {MISSING: "; ".join(self.missing)})
        finally:
            self.missing = before + self.missing

    def _note(self, run: Run, name: str, error: Exception) -> None:
        self.missing.append(f"{name} of {run.info.run_name}: {_short(error)}")

    def _describe(self, run: Run, text: str) -> None:
        """Set the description of a run, unless it was edited in MLflow."""
        if _hash(run.data.tags.get(NOTE, "")) in (_hash(""), run.data.tags.get("leash.described")):
            self._tags(run, {NOTE: text, "leash.described": _hash(text[:5000])})

    def _status(self, run: Run, status: str, ended: int) -> None:
        """Set the status of a run, where it has another."""
        if run.info.status == status and (status == "RUNNING" or run.info.end_time == ended):
            return
        if status == "RUNNING":
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            self._client.set_terminated(run.info.run_id, status, end_time=ended)

    def _page(self, run_id: str, path: str = "") -> str:
        """The address of a run, or of one of its artifacts, inside MLflow's pages."""
        return f"#/experiments/{self._experiment}/runs/{run_id}" + f"/artifacts/{path}" * bool(path)


def _metrics(stage: Mapping[str, Any]) -> dict[str, Any]:
    return record.read(stage["folder"] / record.FILES / "metrics" / f"{stage['stage']}.json")


def _csv(stage: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    with suppress(OSError), (stage["folder"] / record.FILES / "plots" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))
    return []


def _points(stage: Mapping[str, Any]) -> list[tuple[str, int, int, float]]:
    """The points of a stage: those that it has logged, else, of one that DVC restored, the rows of its plot."""
    name = stage["stage"]
    if (stage["folder"] / record.LIVE).exists():
        return record.rows(stage["folder"])[0]
    table = _csv(stage, name)
    if len({row.get("step") for row in table}) < len(table):  # several rows a step: no curve
        return []
    return [
        (f"{name}/{key}", int(row["step"]), int(stage["ended"]), float(text))
        for row in table
        for key, text in row.items()
        if text and key != "step"
    ]


def _tables(stage: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Name -> rows of the tables of a stage; conversations become text."""
    name, files = stage["stage"], stage["folder"] / record.FILES / "data" / stage["stage"]
    rows = {path.stem: read_jsonl(path) for path in files.glob("*.jsonl")} if stage["status"] == "FINISHED" else {}
    tables: dict[str, list[dict[str, Any]]] = {}
    if "preferences" in rows:
        tables["preferences"] = rows["preferences"][:TABLE_ROWS]
    elif "samples" in rows and name not in ("best_of_n", "rejection_sft"):
        tables[f"{name}_samples"] = [_led(row) if name == "evaluate" else row for row in rows["samples"]]
    if "answers" in rows:
        seed = next((row["seed"] for row in rows["answers"] if row["seed"] is not None), None)
        beside: dict[str, dict[str, Any]] = {}
        for row in rows["answers"]:
            if row["seed"] in (None, seed):
                beside.setdefault(row["prompt_id"], {"prompt": row["prompt"]})[row["model"]] = row["response"]
        tables["evaluate_answers"] = [_led(row) for row in beside.values()]
    return {name: rows for name, rows in tables.items() if rows}


def _led(row: dict[str, Any]) -> dict[str, Any]:
    """The row with prompt and policy as its first columns."""
    return {**{name: row.get(name) for name in ("prompt", "policy")}, **row}


def _cell(value: Any) -> Any:
    """A cell without NaN, and a conversation as text."""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "content" in one for one in value):
        return as_text(value)
    return None if isinstance(value, float) and value - value != 0 else value


def _measured(stage: Mapping[str, Any]) -> list[tuple[str, str, int, dict[str, float]]]:
    """(name, kind, step, figures) of the models that a stage has measured: those of the evaluation, with the policy
    last, or PPO's snapshots."""
    if stage["stage"] == "evaluate":
        models = _metrics(stage).get("models") or {}
        names = sorted(models, key="policy".__eq__)
        return [(name, "model", step, _of_a_model(models[name])) for step, name in enumerate(names)]
    if stage["stage"] == "select":
        rows = [row for row in _csv(stage, "select") if int(row["step"]) and float(row["eta"]) == 1]
        return [(f"snapshot {row['step']}", "snapshot", int(row["step"]), _of_a_model(row)) for row in rows]
    return []


def _of_a_model(figures: Mapping[str, Any]) -> dict[str, float]:
    """Rounded: MLflow's list shows all digits."""
    return {name: float(f"{float(figures[name]):.5g}") for name in OF_A_MODEL if figures.get(name) not in (None, "")}


def _make_database(uri: str) -> None:
    """Create the SQLite file with MLflow's tables beside its path and rename it: a process killed between MLflow's
    migrations would leave a file that cannot be opened."""
    final = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or final.exists():
        return
    with TemporaryDirectory(dir=final.parent, prefix=f"{final.name}-") as folder:
        MlflowClient(f"sqlite:///{folder}/{final.name}").search_experiments()
        (Path(folder) / final.name).replace(final)


@contextmanager
def _reached() -> Iterator[None]:
    """Turn errors of MLflow and of the network into Unreachable."""
    try:
        yield
    except Unreachable:
        raise
    except Exception as error:
        raise Unreachable(_short(error)) from error


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _short(error: Exception) -> str:
    """The cause in one short line."""
    text = settings.without_credentials(str(error)).strip() or type(error).__name__
    for phrase in ("timed out", "Connection refused", "Name or service not known", "database is locked"):
        if phrase in text:
            return phrase
    return text.splitlines()[0][:160]


def follow(root: Path, folder: Path, name: str, seconds_at_the_end: float) -> None:
    """Show the points of a running stage, the execution `name` of the record `folder`, and the machine's load, until
    standard input ends, with the stage. Then send all of the record, and end this process after at most so long."""
    os.nice(19)  # a training on all cores stops when one of them is busy
    ended = threading.Event()

    def watch() -> None:
        select.select([sys.stdin], [], [])
        ended.set()
        time.sleep(seconds_at_the_end)
        os._exit(1)  # a request may hang

    threading.Thread(target=watch, daemon=True).start()
    uri, lock = settings.tracking_uri(root), FileLock(record.folder_of(root).parent / "mlflow.lock")
    exporter, monitor, pause = None, None, 0.0
    while not ended.wait(pause):
        stage = next((one for one in record.executions(folder) if one["folder"].name == name), None)
        if stage is None or stage["status"] != "RUNNING":
            break
        begun = time.monotonic()
        with suppress(Exception):  # MLflow is away: the next round tries again
            if not settings.unreachable(uri) and lock.acquire(LOCK_SECONDS):
                exporter = exporter or Exporter(root, uri)
                run_id = exporter.follow(folder, stage)
                if monitor is None:
                    monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=uri)
                    monitor.start()
        lock.release()
        pause = max(PAUSE_SECONDS, 10 * (time.monotonic() - begun))
    if monitor is not None:
        monitor.finish()
    if not settings.unreachable(uri):
        with suppress(Unreachable):
            export(root, records=[folder])


def main() -> None:
    """`python -m tasks.tracking.exporter ROOT` sends all records and prints a line for what is left."""
    try:
        missing = export(Path(sys.argv[1]))
    except Unreachable as error:
        missing = [str(error)]
    if missing:
        print("; ".join(missing[:3]) + f" and {len(missing) - 3} more" * (len(missing) > 3))


if __name__ == "__main__":
    main()
