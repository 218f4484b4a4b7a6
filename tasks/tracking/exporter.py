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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModelOutput,
    LoggedModelStatus,
    Metric,
    Param,
    Run,
    RunTag,
)
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS, MLFLOW_MODEL_IS_EXTERNAL, MLFLOW_MODEL_VERSIONS

from rlhf_core.data.chat import as_text
from rlhf_core.locks import FileLock
from tasks import naming
from tasks.datasets.jsonl import read_jsonl
from tasks.summary import SUMMARY
from tasks.tracking import record, settings, titles
from tasks.tracking.defaults import filled, filled_of_stage

LOCK_SECONDS = 30.0
PAUSE_SECONDS = 5.0
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
KEY, SECONDS, COMPLETE, PARENT = "leash.stage_key", "leash.seconds", "leash.complete", "mlflow.parentRunId"
NOTE, REPORT, MISSING, SENT = "mlflow.note.content", "report/index.html", "leash.missing", "leash.files"
MODEL_NOTE = 'Policies. A version loads with `mlflow.pyfunc.load_model("models:/{0}/1")` or `mlflow.transformers`.'

for _name in ("urllib3.connectionpool", "alembic"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class Unreachable(Exception):
    """MLflow cannot be reached now."""


def export(root: Path, uri: str | None = None) -> list[str]:
    """Make MLflow agree with the records of `root`, and remove those that have arrived. Returns a line for each thing
    that failed, which the next call tries again. Raises Unreachable."""
    settings.prepare_environment()
    uri = uri or settings.tracking_uri(root)
    mark, missing = settings.uri_mark(uri), list[str]()
    lock = FileLock(record.folder_of(root).parent / "mlflow.lock")
    if not record.folder_of(root).is_dir():
        return []
    if not lock.acquire(LOCK_SECONDS):
        raise Unreachable("another process sends to it")
    try:
        try:
            exporter = Exporter(root, uri)
        except Exception as error:
            raise Unreachable(_short(error)) from error
        for folder in record.pending(root, mark):
            changed = record.changed_ns(folder)
            try:
                running = exporter.show(folder)
            except Exception as error:
                missing.append(f"{folder.name}: {_short(error)}")
                if settings.unreachable(uri):
                    break
                continue  # one that fails does not stop the others
            missing += exporter.missing
            if not exporter.missing and not running:
                record.confirm(folder, mark, changed, exporter.page)
        record.prune(root, mark)
    finally:
        lock.release()
    return missing


class Exporter:
    """A connection to the project's experiment at one address. Every method makes only what MLflow lacks."""

    def __init__(self, root: Path, uri: str) -> None:
        self.missing: list[str] = []
        """What failed of the last record."""
        self.page = ""
        """The page of the last record's run."""
        self._root, self._uri = root, uri
        _make_database(uri)
        self._client = MlflowClient(uri, os.environ.get("MLFLOW_REGISTRY_URI") or uri)
        name = naming.experiment_name(root)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None and experiment.lifecycle_stage == "deleted":
            self._client.restore_experiment(experiment.experiment_id)
        place = settings.artifact_location(root, uri)
        self._experiment = experiment.experiment_id if experiment else self._client.create_experiment(name, place)

    def show(self, folder: Path) -> dict[str, str]:
        """Show a record. Returns the ids of the runs of what is running, by folder."""
        self.missing, self.page, run = [], "", record.read(folder / record.RUN)
        if run.get("kind") == "study":
            shown = self._study_run(run["study"])
            self._log(shown, run.get("metrics", {}), run["touched"])
            for file in sorted((folder / record.FILES).glob("*")):
                self._file(shown, file, file.name)
            is_lost = run["status"] == "RUNNING" and not record.is_alive(run, run["touched"] / 1000)
            status = "KILLED" if is_lost else run["status"]
            self._status(shown, status, run["touched"])
            running = {folder.name: shown.info.run_id} if status == "RUNNING" else {}
        elif stages := record.executions(folder):
            shown, running = self._pipeline(run, stages)
        else:
            return {}
        if self.missing or shown.data.tags.get(MISSING):
            self._log(shown, tags={MISSING: "; ".join(self.missing)})
        self.page = settings.page_of(self._uri, self._experiment, shown.info.run_id)
        return running

    def _pipeline(self, run: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> tuple[Run, dict[str, str]]:
        """Show a pipeline run and its stages; its run, and the ids of the runs of running stages by folder."""
        executed = [stage for stage in stages if not stage.get("restored")]
        # The run, with its parameters and tags.
        found = self._search(f"tags.`leash.pipeline_key` = '{run['key']}' and tags.`leash.workspace` = "
                             f"'{run['workspace']}'")  # fmt: skip
        started = found[0].info.start_time if found else min(stage["started"] for stage in stages)
        earlier = self._search(f"attributes.start_time < {started} and tags.`leash.pipeline_key` LIKE '%'", most=50)
        before = next((one for one in earlier if "leash.study" not in one.data.tags), None)
        tags = run["tags"] | {"leash.pipeline_key": run["key"], "leash.workspace": run["workspace"]}
        if run.get("study"):
            tags |= {
                "leash.study": settings.name_of_study(run["study"]),
                PARENT: self._study_run(run["study"]).info.run_id,
            }
        title = run.get("experiment") or titles.title(run, before)
        parent = found[0] if found else self._client.create_run(self._experiment, started, tags, title)
        self._log(
            parent, params=filled(run["params"]), tags=tags if executed else {}
        )  # else the commit is of a later time

        # The runs of its stages.
        known = self._search(f"tags.{PARENT} = '{parent.info.run_id}'", most=1000)
        children = {child.data.tags.get(KEY): child for child in known}
        newest: dict[str, Mapping[str, Any]] = {}
        running: dict[str, str] = {}
        for stage in stages:
            newest[stage["stage"]] = stage
            child = children.get(stage["key"])
            if child is not None and child.data.tags.get(COMPLETE) == str(stage.get("ended")):
                continue
            if stage.get("restored"):
                if child is not None and child.info.status == "FINISHED":
                    continue  # this run has executed it
                if maker := self._search(f"tags.`{KEY}` = '{stage['key']}' and attributes.status = 'FINISHED'"):
                    self._log(parent, tags={f"leash.restored.{stage['stage']}": maker[0].info.run_id})
                    continue
            children[stage["key"]] = child = self._stage(parent, child, stage, run)
            if stage["status"] == "RUNNING":
                running[stage["folder"].name] = child.info.run_id

        # What one compares: figures, curves, datasets, tables, report, description.
        evaluated, ppo, reported = newest.get("evaluate"), newest.get("ppo"), newest.get("report")
        figures = titles.numbers(record.read(_file_of(evaluated, SUMMARY))) if evaluated else {}
        at = max(stage.get("ended") or stage["started"] for stage in newest.values())
        self._log(parent, figures, at)
        if executed:
            took = sum(float(child.data.tags.get(SECONDS, 0)) for child in children.values())
            self._log(parent, {"seconds": round(took, 1)}, at)
        if ppo:
            self._log_points(parent, ppo["key"][:8], [point for point in _points(ppo) if point[0] in CURVES])
        inputs = {path: digest for stage in newest.values() for path, digest in stage["inputs"].items()}
        self._inputs(parent, {path: digest for path, digest in inputs.items()
                              if path in DATASETS or path.startswith("data/raw/")}, "raw data")  # fmt: skip
        for stage in () if running else newest.values():  # the files are large
            for name, rows in _tables(stage).items():
                self._table(parent, name, rows)
        note = description = titles.note(run, before, figures)
        if reported and (report := _file_of(reported, REPORT)).is_file():
            self._file(parent, report, REPORT)
            note += f"; [report]({self._link(parent, REPORT)})"
        written = parent.data.tags.get(NOTE, "")
        edited = written and _md5(written.encode()) != parent.data.tags.get("leash.described")
        if not edited and (executed or not written):
            self._log(parent, tags={NOTE: note, "leash.described": _md5(note[:5000].encode())})
        if evaluated and evaluated["status"] == "FINISHED" and "models/policy" in evaluated["inputs"]:
            self._try(parent, "registered policy", lambda: self._register(parent, run, evaluated, figures, description))

        states = {stage["status"] for stage in newest.values()} - {"FINISHED"}
        if executed or parent.info.status == "RUNNING":
            ended = max(stage.get("ended") or stage["started"] for stage in executed or stages)
            self._status(parent, "RUNNING" if running else min(states, default="FINISHED"), ended)
        return parent, running

    def _stage(self, parent: Run, child: Run | None, stage: Mapping[str, Any], run: Mapping[str, Any]) -> Run:
        """Show one execution of a stage, in the run `child` or a new one."""
        files, missing = stage["folder"] / record.FILES, len(self.missing)
        tags = {k: v for k, v in run["tags"].items() if k.startswith("mlflow.source.git.") or k == "mlflow.user"}
        tags |= record.rows(stage["folder"])[1]
        tags |= {"mlflow.source.name": f"tasks.{stage['stage']}", "mlflow.source.type": "LOCAL"}
        for file in (files / "data").rglob("*.jsonl"):  # by which the rows are found again
            tags[settings.OUT_TAG + file.relative_to(files).as_posix()] = _md5(file.read_bytes())
        if stage.get("restarts"):
            tags["leash.restarts"] = str(stage["restarts"])
        if stage.get("restored"):
            tags["leash.restored"] = "true"
        elif stage.get("ended"):
            tags[SECONDS] = f"{(stage['ended'] - stage['started']) / 1000:.1f}"
        if child is None:
            identity = {"leash.stage": stage["stage"], KEY: stage["key"], "leash.workspace": run["workspace"],
                        PARENT: parent.info.run_id}  # fmt: skip
            child = self._client.create_run(self._experiment, stage["started"], tags | identity, stage["stage"])
        self._log(child, params=filled_of_stage(stage["stage"], stage["params"]), tags=tags)
        self._inputs(child, {k: v for k, v in stage["inputs"].items() if k.startswith("data/")}, stage["stage"])
        self._log_points(child, "live" if (stage["folder"] / record.LIVE).exists() else "plot", _points(stage))
        if stage["status"] == "FINISHED":
            models = _measured(stage)
            if models:
                self._try(child, "models", lambda: self._models(parent, child, stage, models))
            of_models = {name for *_, figures in models for name in figures}
            numbers = titles.numbers(_metrics(stage)).items()
            self._log(child, {name: value for name, value in numbers if name not in of_models}, stage["ended"])
            for name, rows in _tables(stage).items():
                self._table(child, name, rows)
            for file in sorted(path for path in files.rglob("*") if path.is_file()):
                place = file.relative_to(files).as_posix()
                if not place.startswith("data/"):  # of these a table of the first rows
                    self._file(child, file, place)
        self._status(child, stage["status"], stage.get("ended", 0))
        if "ended" in stage and len(self.missing) == missing:
            self._log(child, tags={COMPLETE: str(stage["ended"])})
        return child

    def _study_run(self, label: str) -> Run:
        """The run of a study, which its trials are children of."""
        found = self._search(f"tags.`leash.study_run` = '{label}'")
        tags = {"leash.study_run": label, "mlflow.source.name": "leash study"}
        name = settings.name_of_study(label)
        return found[0] if found else self._client.create_run(self._experiment, tags=tags, run_name=name)

    def _models(
        self,
        parent: Run,
        child: Run,
        stage: Mapping[str, Any],
        models: Sequence[tuple[str, str, int, dict[str, float]]],
    ) -> None:
        """The models that a stage has measured, in MLflow's list of models, of the pipeline's run; their metrics are
        those of the stage's run, and `step` orders the models of one stage."""
        query, prompts = f"source_run_id = '{parent.info.run_id}'", PROMPTS[stage["stage"]]
        known = {model.name: model for model in self._client.search_logged_models([self._experiment], query)}
        linked = {one.model_id for one in (parent.outputs.model_outputs if parent.outputs else [])}
        place = {"dataset_name": Path(prompts).stem, "dataset_digest": stage["inputs"].get(prompts, "unknown")[:36]}
        for name, kind, step, figures in models:
            model = known.get(name)
            if model is None:
                digest = stage["inputs"].get(f"models/{name}", "")
                tags = {MLFLOW_MODEL_IS_EXTERNAL: "true"} | ({"leash.md5": digest} if digest else {})
                model = self._client.create_logged_model(
                    self._experiment, name, parent.info.run_id, tags, model_type=kind
                )
            if model.model_id not in linked:
                self._client.log_outputs(parent.info.run_id, [LoggedModelOutput(model.model_id, step)])
            if model.status != LoggedModelStatus.READY:
                self._client.finalize_logged_model(model.model_id, "READY")
            have = {metric.key: metric.value for metric in model.metrics or []}
            new = [Metric(k, v, stage["ended"], step, model_id=model.model_id, **place)
                   for k, v in figures.items() if have.get(k) != v]  # fmt: skip
            self._client.log_batch(child.info.run_id, metrics=new)

    def _register(
        self, parent: Run, run: Mapping[str, Any], stage: Mapping[str, Any], figures: Mapping[str, float], note: str
    ) -> None:
        """A version of the registered policy for its DVC hash. The newest policy, unless it is that of a trial or of a
        restored stage, gets the alias."""
        # MLflow 3.17: SQLite takes any source; a server takes dvc:// with or without run id, but no local path.
        name, alias, digest = naming.model_name(self._root), settings.POLICY_ALIAS, stage["inputs"]["models/policy"]
        found = self._client.search_registered_models(f"name = '{name}'")
        if not found:
            self._client.create_registered_model(name, description=MODEL_NOTE.format(name))
        start = f"dvc://models/policy?md5={digest}"
        known = self._client.search_model_versions(f"name = '{name}' and source_path LIKE '{start}%'")
        if known:
            number = known[0].version
        else:
            query = urlencode({"md5": digest, "project": settings.main_checkout(self._root).resolve()})
            tags = {key: f"{value:.6g}" for key, value in figures.items()}
            tags |= {"leash.report": f"runs:/{parent.info.run_id}/{REPORT}", "leash.made": str(stage["ended"])}
            tags |= {k: v for k, v in run["tags"].items() if k == "leash.commit"}
            note += f"\n\n[run]({self._link(parent)}), [report]({self._link(parent, REPORT)})"
            source = f"dvc://models/policy?{query}"
            number = self._client.create_model_version(
                name, source, parent.info.run_id, tags, description=note, await_creation_for=0
            ).version
        aliased = found[0].aliases.get(alias) if found else None
        newest = int(self._client.get_model_version(name, aliased).tags.get("leash.made", 0)) if aliased else -1
        is_newer = stage["ended"] > newest and (newest < 0 or not stage.get("restored"))
        if aliased != number and is_newer and not run.get("study"):
            self._client.set_registered_model_alias(name, alias, number)
        if not known:
            query = f"source_run_id = '{parent.info.run_id}' AND name = 'policy'"
            for model in self._client.search_logged_models([self._experiment], query):
                link = json.dumps([{"name": name, "version": str(number)}])
                self._client.set_logged_model_tags(model.model_id, {MLFLOW_MODEL_VERSIONS: link})

    # What all runs have.

    def _search(self, query: str, most: int = 1) -> list[Run]:
        """The newest runs of the experiment that match."""
        order = ["attributes.start_time DESC"]
        return list(self._client.search_runs([self._experiment], query, max_results=most, order_by=order))

    def _log(
        self,
        run: Run,
        figures: Mapping[str, float] | None = None,
        at: int = 0,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Log what the run does not have, or has with another value; of a parameter the first value is kept."""
        named = {record.safe_name(name): str(text)[:5000] for name, text in (tags or {}).items()}
        new = {name: text for name, text in named.items() if run.data.tags.get(name) != text}
        metrics = [Metric(record.safe_name(name), value, at, 0) for name, value in (figures or {}).items()]
        self._client.log_batch(
            run.info.run_id,
            metrics=[metric for metric in metrics if run.data.metrics.get(metric.key) != metric.value],
            params=[Param(name, text) for name, text in (params or {}).items() if name not in run.data.params],
            tags=[RunTag(name, text) for name, text in new.items()],
        )
        run.data.tags.update(new)

    def _log_points(self, run: Run, source: str, points: Sequence[tuple[str, int, int, float]]) -> None:
        """Log the points that the run does not have. A tag counts those of this source that it has; a killed exporter
        may send up to 1,000 points twice, which MLflow's tables store once."""
        name, _, count = run.data.tags.get("leash.points", "").partition(":")
        done = int(count) if name == source else 0
        for start in range(done, len(points), 1000):
            part = points[start : start + 1000]
            self._client.log_batch(run.info.run_id, [Metric(key, value, at, step) for key, step, at, value in part])
            self._log(run, tags={"leash.points": f"{source}:{start + len(part)}"})

    def _inputs(self, run: Run, inputs: Mapping[str, str], context: str) -> None:
        """The datasets that a run reads, with their DVC hashes."""
        found = []
        for path, digest in inputs.items():
            dataset = Dataset(Path(path).stem, digest[:36], "local", json.dumps({"uri": path}))
            found.append(DatasetInput(dataset, [InputTag("mlflow.data.context", DATASETS.get(path, context))]))
        if found:
            self._client.log_inputs(run.info.run_id, found)

    def _table(self, run: Run, name: str, rows: list[dict[str, Any]]) -> None:
        """A table for MLflow's evaluation view, which groups by the first column and compares runs by the second, and
        shows no nested runs: the pipeline's run has the tables, too."""
        place, columns = f"{name}.json", list(rows[0])
        content = {"columns": columns, "data": [[_cell(row.get(column)) for column in columns] for row in rows]}
        text = json.dumps(content, ensure_ascii=False, default=str).encode(errors="replace").decode()
        if self._artifact(run, place, text.encode(), lambda: self._client.log_text(run.info.run_id, text, place)):
            tables = json.loads(run.data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
            if all(table["path"] != place for table in tables):
                self._log(run, tags={MLFLOW_LOGGED_ARTIFACTS: json.dumps([*tables, {"path": place, "type": "table"}])})

    def _file(self, run: Run, path: Path, place: str) -> None:
        """A file as the artifact `place`."""
        folder = Path(place).parent.as_posix()
        target = None if folder == "." else folder
        log = self._client.log_artifact
        self._artifact(run, place, path.read_bytes(), lambda: log(run.info.run_id, str(path), target))

    def _artifact(self, run: Run, place: str, content: bytes, upload: Callable[[], None]) -> bool:
        """Upload an artifact, unless the run has it with this content. Whether it has it now."""
        digest, sent = _md5(content)[:8], json.loads(run.data.tags.get(SENT, "{}"))
        if sent.get(place) == digest:
            return True
        if not self._try(run, place, upload):
            return False
        self._log(run, tags={SENT: json.dumps(sent | {place: digest})})
        return True

    def _try(self, run: Run, name: str, make: Callable[[], None]) -> bool:
        """Whether `make` succeeds. One that fails, for whatever reason, is noted, and all other things go on: a server
        may have no room for a file, no rights, no list of models, or no registry."""
        try:
            make()
        except Exception as error:
            self.missing.append(f"{name} of {run.info.run_name}: {_short(error)}")
            return False
        return True

    def _status(self, run: Run, status: str, ended: int) -> None:
        """Set the status of a run, where it has another."""
        if run.info.status == status and (status == "RUNNING" or run.info.end_time == ended):
            return
        if status == "RUNNING":
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            self._client.set_terminated(run.info.run_id, status, end_time=ended)

    def _link(self, run: Run, path: str = "") -> str:
        """The address of a run, or of one of its artifacts, inside MLflow's pages."""
        return f"#/experiments/{self._experiment}/runs/{run.info.run_id}" + f"/artifacts/{path}" * bool(path)


def _file_of(stage: Mapping[str, Any], path: str) -> Path:
    """The copy of an output in the record of a stage."""
    return Path(stage["folder"]) / record.FILES / path


def _metrics(stage: Mapping[str, Any]) -> dict[str, Any]:
    return record.read(_file_of(stage, f"metrics/{stage['stage']}.json"))


def _plot(stage: Mapping[str, Any]) -> list[dict[str, str]]:
    with suppress(OSError), _file_of(stage, f"plots/{stage['stage']}.csv").open(newline="") as file:
        return list(csv.DictReader(file))
    return []


def _points(stage: Mapping[str, Any]) -> list[tuple[str, int, int, float]]:
    """The points of a stage: those that it has logged, else, of one that DVC restored, the rows of its plot."""
    name = stage["stage"]
    if (stage["folder"] / record.LIVE).exists():
        return record.rows(stage["folder"])[0]
    table = _plot(stage)
    if len({row.get("step") for row in table}) < len(table):  # several rows a step: no curve
        return []
    return [
        (f"{name}/{key}", int(row["step"]), int(stage["ended"]), float(text))
        for row in table
        for key, text in row.items()
        if text and key != "step"
    ]


def _tables(stage: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Name -> rows of the tables of a finished stage; those of the evaluation begin with prompt and policy."""
    name, folder = stage["stage"], _file_of(stage, "data") / stage["stage"]
    rows = {path.stem: read_jsonl(path) for path in folder.glob("*.jsonl")} if stage["status"] == "FINISHED" else {}
    tables: dict[str, list[dict[str, Any]]] = {}
    if name == "evaluate":
        first = {"prompt": None, "policy": None}
        tables["evaluate_samples"] = [first | row for row in rows.get("samples", [])]
        answers = rows.get("answers", [])
        seed = next((row["seed"] for row in answers if row["seed"] is not None), None)
        beside: dict[str, dict[str, Any]] = {}
        for row in answers:
            if row["seed"] in (None, seed):
                beside.setdefault(row["prompt_id"], first | {"prompt": row["prompt"]})[row["model"]] = row["response"]
        tables["evaluate_answers"] = list(beside.values())
    elif name == "preferences":
        tables["preferences"] = rows.get("preferences", [])[:TABLE_ROWS]
    elif name not in ("best_of_n", "rejection_sft"):
        tables[f"{name}_samples"] = rows.get("samples", [])
    return {name: rows for name, rows in tables.items() if rows}


def _cell(value: Any) -> Any:
    """A cell without NaN, and a conversation as text."""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "content" in one for one in value):
        return as_text(value)
    return None if isinstance(value, float) and value - value != 0 else value


def _measured(stage: Mapping[str, Any]) -> list[tuple[str, str, int, dict[str, float]]]:
    """(name, kind, step, figures) of the models that a stage has measured: those of the evaluation, with the policy
    last, or PPO's snapshots."""
    found: list[tuple[str, str, int, Mapping[str, Any]]] = []
    if stage["stage"] == "evaluate":
        models = _metrics(stage).get("models") or {}
        names = sorted(models, key="policy".__eq__)
        found = [(name, "model", step, models[name]) for step, name in enumerate(names)]
    if stage["stage"] == "select":
        rows = [row for row in _plot(stage) if int(row["step"]) and float(row["eta"]) == 1]
        found = [(f"snapshot {row['step']}", "snapshot", int(row["step"]), row) for row in rows]
    return [  # rounded: MLflow's list shows all digits
        (name, kind, step, {k: float(f"{float(row[k]):.5g}") for k in OF_A_MODEL if row.get(k) not in (None, "")})
        for name, kind, step, row in found
    ]


def _make_database(uri: str) -> None:
    """Create the SQLite file with MLflow's tables beside its path and rename it: a process killed between MLflow's
    migrations would leave a file that cannot be opened."""
    final = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or final.exists():
        return
    with TemporaryDirectory(dir=final.parent, prefix=f"{final.name}-") as folder:
        MlflowClient(f"sqlite:///{folder}/{final.name}").search_experiments()
        (Path(folder) / final.name).replace(final)


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _short(error: Exception) -> str:
    """The cause in one short line."""
    text = settings.without_credentials(str(error)).strip() or type(error).__name__
    return text.splitlines()[0][:160]


def follow(root: Path, folder: Path, name: str, seconds_at_the_end: float) -> None:
    """Show the record `folder` while its execution `name` runs, and the machine's load, until standard input ends, with
    the stage. Then send all that waits, and end this process after at most so long."""
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
        begun = time.monotonic()
        with suppress(Exception):  # MLflow is away: the next round tries again
            if not settings.unreachable(uri) and lock.acquire(LOCK_SECONDS):
                exporter = exporter or Exporter(root, uri)
                running = exporter.show(folder)
                if name not in running:
                    break
                if monitor is None:
                    monitor = SystemMetricsMonitor(running[name], resume_logging=True, tracking_uri=uri)
                    monitor.start()
        lock.release()
        pause = max(PAUSE_SECONDS, 10 * (time.monotonic() - begun))
    lock.release()
    if monitor is not None:
        monitor.finish()
    if not settings.unreachable(uri):
        with suppress(Unreachable):
            export(root)


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
