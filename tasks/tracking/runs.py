"""Writes the events of an outbox to MLflow. Only this module of `tasks` imports mlflow, which takes seconds.

All handlers are idempotent: a sender may be killed after it has sent an event and before it has saved its position.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, Metric, Param, Run, RunData, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS, MLFLOW_MODEL_IS_EXTERNAL, MLFLOW_MODEL_VERSIONS

from rlhf_core.locks import FileLock
from tasks.tracking import settings
from tasks.tracking.outbox import Event, State, Unreachable, now_ms

LOCK_SECONDS = 20.0
PARAM_BATCH = 100
SYSTEM_PREFIX = "system/"
CURVES = tuple(f"ppo/{name}" for name in ("gold", "reward_raw", "kl", "entropy", "response_tokens_mean", "value_loss"))
"""Metrics of a stage that its pipeline run gets too: the curves by which one compares runs, best first."""
OPTIONAL = ("model", "register")
"""Events that are left out where the server refuses them: older servers have no models, others no registry."""
FINAL = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
REPORT = "report/index.html"
REGISTRY = """Policies of Leash. A version loads with `mlflow.transformers.load_model("models:/leash-policy/1")`."""
NOTE = "mlflow.note.content"
REFUSED = ("ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED", "PERMISSION_DENIED", "BAD_REQUEST", "FEATURE_DISABLED", "NOT_FOUND")

if not hasattr(RunData(), "_metric_objs"):
    raise ImportError(f"mlflow {mlflow.__version__} has no RunData._metric_objs; install the one of constraints.txt")

for _name in ("urllib3.connectionpool", "alembic"):
    logging.getLogger(_name).setLevel(logging.ERROR)


class MlflowWriter:
    """Sends a repository's events to one MLflow address. Not thread-safe."""

    def __init__(self, root: Path, uri: str, warn: Callable[[str], None]) -> None:
        self.uri_mark = settings.uri_mark(uri)
        self._root = root
        self._uri = uri
        self._warn = warn
        self._workspace = settings.workspace_id(root)
        self._client: Any = None
        self._experiment = ""

    def write(self, events: list[Event], state: State, folder: Path) -> None:
        """Send `events` in order and save `state` in `folder` after each batch. Raises Unreachable."""
        for kind, group in groupby(events, key=lambda event: event.kind):
            batch = list(group)
            parts = [batch] if kind == "metrics" else [[event] for event in batch]
            for part in parts:
                if not self._send(kind, part, state, folder):
                    return
                state.offset = part[-1].end
                try:
                    state.save(folder)
                except OSError as error:
                    raise Unreachable(f"cannot save what was sent: {error}") from error

    def killed(self, state: State) -> None:
        """Close the run of a dead process, or the pipeline's run if it had none of its own."""
        run_id = state.run_id or state.parent_id
        if run_id is not None and not state.closed:
            with suppress(MlflowException), _reached():
                self._connect().set_terminated(run_id, "KILLED", end_time=now_ms())

    def _send(self, kind: str, part: list[Event], state: State, folder: Path) -> bool:
        """Send events of one kind; False if the outbox must be sent again from its beginning."""
        try:
            with _reached(FINAL + REFUSED * (kind in OPTIONAL)):
                self._connect()
                getattr(self, f"_on_{kind.replace('-', '_') or 'nothing'}")(part, state, folder)
        except MlflowException as error:
            if kind.endswith("-open"):
                raise Unreachable(settings.without_credentials(str(error))) from error
            if error.error_code == "RESOURCE_DOES_NOT_EXIST" and not state.replayed:
                fresh = State(state.uri, replayed=True)  # the database was replaced: send everything again
                fresh.save(folder)
                state.__dict__.update(fresh.__dict__)
                return False
            if len(part) > 1:
                return all(self._send(kind, [event], state, folder) for event in part)
            self._warn(f"tracking: MLflow refused a {kind} event ({_short(error)}); left out")
        return True

    def _connect(self) -> Any:
        """The client, opened under a lock: two processes must not create the SQLite file at once."""
        if self._client is None:
            with self._exclusive():
                _make_database(self._uri)
                client = MlflowClient(self._uri, registry_uri=self._uri)
                experiment = client.get_experiment_by_name(settings.EXPERIMENT)
                if experiment is None:
                    place = settings.artifact_location(self._root, self._uri)
                    self._experiment = client.create_experiment(settings.EXPERIMENT, artifact_location=place)
                else:
                    self._experiment = experiment.experiment_id
                    if experiment.lifecycle_stage == "deleted":
                        client.restore_experiment(self._experiment)
                self._client = client
        return self._client

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        lock = FileLock(settings.main_checkout(self._root) / "work" / "mlflow.lock")
        if not lock.acquire(LOCK_SECONDS):
            raise Unreachable("another process holds work/mlflow.lock")
        try:
            yield
        finally:
            lock.release()

    def _find(self, conditions: dict[str, str], extra: str = "") -> Run | None:
        """The newest run with these tags."""
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in conditions.items()) + extra
        found = self._client.search_runs(
            [self._experiment], query, max_results=1, order_by=["attributes.start_time DESC"]
        )
        return found[0] if found else None

    # One handler for each kind of event.

    def _on_nothing(self, part: list[Event], state: State, folder: Path) -> None:
        """Skip a broken line of a process that was killed while writing."""

    def _on_parent_open(self, part: list[Event], state: State, folder: Path) -> None:
        event = part[0]
        tags = {"leash.pipeline_key": event.body["key"], "leash.workspace": self._workspace_of(event)}
        with self._exclusive():
            extra = self._study_tags(event.body.get("study"))
            parent = self._find(tags) or self._client.create_run(
                self._experiment,
                start_time=event.at,
                tags=tags | event.body["tags"] | extra,
                run_name=event.body.get("name") or f"pipeline {event.body['key'][:8]}",
            )
            run_id = state.parent_id = parent.info.run_id
            # `runtime` may differ under one key and changes no result: the first value is kept
            self._log_params(run_id, event.body["params"], parent.data.params)
            opened = max(event.at, int(parent.data.tags.get("leash.opened", 0)))
            self._log_tags(run_id, event.body["tags"] | extra | {"leash.opened": str(opened)})
            if not parent.data.tags.get(NOTE):
                self._describe(run_id, parent.data.tags, event.body.get("note", ""))
            if parent.info.status != "RUNNING" and event.at > (parent.info.end_time or 0):
                self._client.update_run(run_id, status="RUNNING")

    def _describe(self, run_id: str | None, tags: dict[str, str], text: str) -> None:
        """Set the description of a run, unless somebody has changed it in MLflow."""
        if _hash(tags.get(NOTE, "")) in (_hash(""), tags.get("leash.described")):
            self._log_tags(run_id, {NOTE: text, "leash.described": _hash(text)})

    def _page(self, run_id: str | None, path: str = "") -> str:
        """The address of a run, or of one of its artifacts, inside MLflow's pages."""
        return f"#/experiments/{self._experiment}/runs/{run_id}" + f"/artifacts/{path}" * bool(path)

    def _workspace_of(self, event: Event) -> str:
        """The workspace that wrote the event; this one for events of earlier versions."""
        return str(event.body.get("workspace") or self._workspace)

    def _study_tags(self, study: str | None) -> dict[str, str]:
        """Tags that make a run the child of the study's run, which is open from now on."""
        if not study:
            return {}
        run = self._find({"leash.study_run": study})
        if run is None:
            tags = {"leash.study_run": study, "mlflow.source.name": "leash study"}
            run = self._client.create_run(self._experiment, tags=tags, run_name=study)
        elif run.info.status != "RUNNING":
            self._client.update_run(run.info.run_id, status="RUNNING")
        return {"leash.study": study, "mlflow.parentRunId": run.info.run_id}

    def _on_study_open(self, part: list[Event], state: State, folder: Path) -> None:
        with self._exclusive():
            self._study_tags(part[0].body["study"])

    def _on_study_close(self, part: list[Event], state: State, folder: Path) -> None:
        """Give the study's run its metrics and files, and end it."""
        event = part[0]
        with self._exclusive():
            run_id = self._study_tags(event.body["study"])["mlflow.parentRunId"]
        self._client.log_batch(
            run_id, metrics=[Metric(key, float(value), event.at, 0) for key, value in event.body["metrics"].items()]
        )
        for file in event.body["files"]:
            self._client.log_artifact(run_id, str(folder / file))
        self._client.set_terminated(run_id, event.body["status"], end_time=event.at)

    def _on_run_open(self, part: list[Event], state: State, folder: Path) -> None:
        event = part[0]
        execution = folder.name
        identity = {"leash.stage_key": event.body["stage_key"], "leash.workspace": self._workspace_of(event)}
        run = self._find({"leash.execution": execution})  # this event was sent before
        unfinished = " and attributes.status != 'FINISHED'"
        run = run or self._find(identity, "" if event.body.get("continues") else unfinished)
        tags = event.body["tags"] | {"mlflow.parentRunId": state.parent_id, "leash.execution": execution}
        if run is None:
            tags |= identity | {"leash.stage": event.body["stage"]}
            run = self._client.create_run(self._experiment, event.at, tags, event.body["stage"])
        elif run.data.tags.get("leash.execution") != execution:
            if run.info.status == "RUNNING":  # its process has died
                self._client.set_terminated(run.info.run_id, "KILLED", end_time=event.at)
            self._client.update_run(run.info.run_id, status="RUNNING")
            tags |= {"leash.restarts": str(int(run.data.tags.get("leash.restarts", 0)) + 1)}
            self._log_tags(run.info.run_id, tags)
        state.run_id = run.info.run_id
        # The public accessors have no step; MLflow's system monitor reads the same field.
        state.last_steps = {metric.key: metric.step for metric in run.data._metric_objs}

    def _on_params(self, part: list[Event], state: State, folder: Path) -> None:
        known = self._client.get_run(state.run_id).data.params
        self._log_params(state.run_id, part[0].body["params"], known)

    def _on_tags(self, part: list[Event], state: State, folder: Path) -> None:
        self._log_tags(state.run_id, part[0].body["tags"])

    def _on_metrics(self, part: list[Event], state: State, folder: Path) -> None:
        """Log metrics without the steps that an earlier process of this run has logged.

        The SQL store's primary key (key, step, timestamp, value) removes duplicates of the same process.
        """
        metrics = []
        for event in part:
            for key, value in event.body["metrics"].items():
                step, last = int(event.body["step"]), state.last_steps.get(key, -1)
                if key.startswith(SYSTEM_PREFIX):  # numbered across processes
                    metrics.append(Metric(key, float(value), event.at, step + last + 1))
                elif step > last:
                    metrics.append(Metric(key, float(value), event.at, step))
        self._client.log_batch(state.run_id, metrics=metrics)
        curves = [metric for metric in metrics if metric.key in CURVES]
        if curves:
            curves.sort(key=lambda metric: CURVES.index(metric.key))
            self._client.log_batch(state.parent_id, metrics=curves)

    def _on_artifact(self, part: list[Event], state: State, folder: Path) -> None:
        body = part[0].body
        run_id = state.parent_id if body.get("parent") else state.run_id
        self._client.log_artifact(run_id, str(folder / body["file"]), body["folder"] or None)

    def _on_table(self, part: list[Event], state: State, folder: Path) -> None:
        """Log a table as mlflow.log_table does, but replace it if it is sent again. The pipeline run gets it too: the
        UI's evaluation view does not show nested runs."""
        entry = {"path": part[0].body["name"], "type": "table"}
        for run_id in filter(None, (state.run_id, state.parent_id)):
            self._client.log_artifact(run_id, str(folder / part[0].body["file"]))
            tables = json.loads(self._client.get_run(run_id).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
            if entry not in tables:
                self._client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*tables, entry]))

    def _on_inputs(self, part: list[Event], state: State, folder: Path) -> None:
        body = part[0].body
        dataset = Dataset(body["name"], body["digest"], "local", json.dumps({"uri": body["path"]}))
        context = [InputTag("mlflow.data.context", body["context"])]
        run_id = state.parent_id if body.get("parent") else state.run_id
        self._client.log_inputs(run_id, [DatasetInput(dataset, context)])

    def _on_headline(self, part: list[Event], state: State, folder: Path) -> None:
        event = part[0]
        known = self._client.get_run(state.parent_id).data.metrics
        fresh = {key: float(value) for key, value in event.body["metrics"].items() if known.get(key) != value}
        metrics = [Metric(key, value, event.at, 0) for key, value in fresh.items()]
        self._client.log_batch(state.parent_id, metrics=metrics)

    def _on_note(self, part: list[Event], state: State, folder: Path) -> None:
        parent, body = self._client.get_run(state.parent_id), part[0].body
        report = f"; [report]({self._page(state.parent_id, REPORT)})" * body["report"]
        self._describe(state.parent_id, parent.data.tags, body["text"] + report)

    def _on_seconds(self, part: list[Event], state: State, folder: Path) -> None:
        """Add the seconds of stages to those that the pipeline run already has, and log their sum."""
        event = part[0]
        known = json.loads(self._client.get_run(state.parent_id).data.tags.get("leash.seconds", "{}"))
        now = known | event.body["stages"]
        self._log_tags(state.parent_id, {"leash.seconds": json.dumps(now)})
        if now != known:
            self._client.log_metric(state.parent_id, "seconds", round(sum(now.values()), 1), event.at, 0)

    def _on_model(self, part: list[Event], state: State, folder: Path) -> None:
        """A model of the pipeline run; it is created once, its metrics are those of the stage's run."""
        event, body = part[0], part[0].body
        model_id = self._model_of(state.parent_id, body["name"])
        if model_id is None:
            tags = {MLFLOW_MODEL_IS_EXTERNAL: "true", "leash.stage_run": str(state.run_id), "leash.md5": body["md5"]}
            tags = {name: value for name, value in tags.items() if value}
            model = self._client.create_logged_model(
                self._experiment, body["name"], state.parent_id, tags, model_type=body["type"]
            )
            model_id = model.model_id
            self._client.log_outputs(state.parent_id, [LoggedModelOutput(model_id, body["step"])])
            self._client.finalize_logged_model(model_id, "READY")
        place = {
            "step": body["step"],
            "model_id": model_id,
            "dataset_name": "prompts",
            "dataset_digest": body["prompts"],
        }
        metrics = [Metric(key, value, event.at, **place) for key, value in body["metrics"].items()]
        self._client.log_batch(state.run_id, metrics=metrics)

    def _model_of(self, parent_id: str | None, name: str) -> str | None:
        """The id of the pipeline run's model of this name."""
        query = f"source_run_id = '{parent_id}' AND name = '{name}'"
        found = self._client.search_logged_models([self._experiment], query, max_results=1)
        return found[0].model_id if found else None

    def _on_restored(self, part: list[Event], state: State, folder: Path) -> None:
        """Tag the run that made a restored output; `untracked` if MLflow has no such run."""
        body = part[0].body
        identity = {"leash.stage_key": body["stage_key"], "leash.stage": body["stage"]}
        run = self._find(identity, " and attributes.status = 'FINISHED'")
        if run and run.data.tags.get("mlflow.parentRunId") == state.parent_id:
            return
        maker = run.info.run_id if run else "untracked"
        self._client.set_tag(state.parent_id, f"leash.restored.{body['stage']}", maker)

    def _on_register(self, part: list[Event], state: State, folder: Path) -> None:
        # MLflow 3.17: SQLite takes any source; a server takes dvc:// with or without run id, but no local path.
        name, body = settings.POLICY_MODEL, part[0].body
        try:
            self._client.create_registered_model(name, description=REGISTRY)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        start = body["source"].partition("&")[0]
        known = self._client.search_model_versions(f"name = '{name}' and source_path LIKE '{start}%'")
        version = known[0] if known else self._new_version(body, state.parent_id)
        self._client.set_registered_model_alias(name, settings.POLICY_ALIAS, version.version)
        try:
            model_id = self._model_of(state.parent_id, "policy")
        except MlflowException as error:
            if error.error_code not in REFUSED:
                raise
            return
        if model_id:
            link = json.dumps([{"name": name, "version": str(version.version)}])
            self._client.set_logged_model_tags(model_id, {MLFLOW_MODEL_VERSIONS: link})

    def _new_version(self, body: dict[str, Any], parent_id: str | None) -> Any:
        """A version of the policy, with its figures, and links to run and report."""
        tags = body.get("tags", {}) | {key: f"{value:.6g}" for key, value in body["metrics"].items()}
        tags["leash.report"] = f"runs:/{parent_id}/{REPORT}"
        pages = f"[run]({self._page(parent_id)}), [report]({self._page(parent_id, REPORT)})"
        note = f"{body.get('note', '')}\n\n{pages}"
        return self._client.create_model_version(
            settings.POLICY_MODEL, body["source"], parent_id, tags, description=note, await_creation_for=0
        )

    def _on_run_close(self, part: list[Event], state: State, folder: Path) -> None:
        self._client.set_terminated(state.run_id, part[0].body["status"], end_time=part[0].at)
        state.closed = True

    def _on_parent_close(self, part: list[Event], state: State, folder: Path) -> None:
        """End the pipeline run, unless it was opened again after this event."""
        parent = self._client.get_run(state.parent_id)
        if part[0].at >= int(parent.data.tags.get("leash.opened", 0)):
            self._client.set_terminated(state.parent_id, part[0].body["status"], end_time=part[0].at)
        state.closed = state.closed or state.run_id is None

    def _log_params(self, run_id: str | None, params: dict[str, str], known: dict[str, str]) -> None:
        items = [Param(key, value) for key, value in params.items() if key not in known]
        for start in range(0, len(items), PARAM_BATCH):
            self._client.log_batch(run_id, params=items[start : start + PARAM_BATCH])

    def _log_tags(self, run_id: str | None, tags: dict[str, str]) -> None:
        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])


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
def _reached(final: tuple[str, ...] = FINAL) -> Iterator[None]:
    """Turn all errors into Unreachable, except those with a code that a retry cannot fix."""
    try:
        yield
    except Unreachable:
        raise
    except Exception as error:
        if getattr(error, "error_code", "") in final:
            raise
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
