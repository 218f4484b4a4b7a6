"""Tracking of a stage (`Tracker`) and of the pipeline run (`PipelineTracker`).

Calls append to the outbox and take milliseconds; a tracking server cannot delay them or make them fail.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlencode

from rlhf_core.data.chat import as_text
from tasks.params.secrets import HIDDEN, is_secret
from tasks.tracking import settings
from tasks.tracking.outbox import Outbox
from tasks.tracking.sender import SenderProcess, Warn, drain, send_rest, warn_once

Status = Literal["FINISHED", "FAILED", "KILLED"]
SENDER_AFTER_SECONDS = 20.0
"""A stage that runs for longer gets a sender, so that its metrics are in MLflow while it trains."""
SYSTEM_SECONDS = 5.0
NOTED_FIGURES = 5
"""More of them would hide the rest of the description, of which MLflow shows a few lines."""
NAMED_CHANGES = 2
"""A run with more changed parameters does not have them in its name."""
NOT_IN_NAMES = re.compile(r"[^\w/.\- :]")
NOT_IN_MODELS = re.compile(r"[^\w\- ]")


@dataclass(frozen=True)
class PipelineIdentity:
    """One pipeline run: `key` is the hash of raw data, closed rounds, parameters and commands; `params` is all of
    params.yaml."""

    key: str
    params: Mapping[str, Any]
    commit: str | None = None
    dirty: bool = False
    changes: tuple[str, ...] = ()
    """Parameters with another value than in the commit: `ppo.kl.coef=0.2 (0.13)`."""
    edited: tuple[str, ...] = ()
    """Other files with uncommitted changes, without what a run writes."""
    round: int = 1

    @property
    def title(self) -> str:
        """For the run in MLflow: `e70966d+ seed 1, kl.coef=0.2`; the plus stands for uncommitted changes."""
        version = f"{self.commit[:7]}{'+' if self.dirty else ''}" if self.commit else "no commit"
        seed = f" seed {self.params['seed']}" if "seed" in self.params else ""
        seed += f", round {self.round}" if self.round > 1 else ""
        changes = [one.split(" (")[0] for one in self.changes if not one.startswith("seed=")]
        return f"{version}{seed}" + "".join(f", {one}" for one in changes if len(changes) <= NAMED_CHANGES)

    def note(self, headline: Mapping[str, float | None]) -> str:
        """The description of the run in MLflow, in Markdown: result, commit, what was changed."""
        shown = [(name, value) for name, value in headline.items() if value is not None][:NOTED_FIGURES]
        figures = ", ".join(f"{name} **{value:.3g}**" for name, value in shown)
        run = os.environ.get(settings.RUN_VARIABLE)
        experiment = f"DVC experiment `{run}`: `dvc exp apply {run}` brings its results back" if run else ""
        code = f"commit `{self.commit[:12]}`" if self.commit else "no commit"
        code += f", with uncommitted changes in {_listed(self.edited)}" if self.edited else ""
        code += f"; parameters changed since: {_listed(self.changes) or 'none'}"
        return "\n\n".join(filter(None, (figures, experiment, code)))


def _listed(names: Sequence[str], most: int = 10) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + rest


class _ParentRun:
    """The pipeline run, for stage and flow."""

    def __init__(
        self, outbox: Outbox, pipeline: PipelineIdentity, workspace: str, tags: Mapping[str, str] | None = None
    ) -> None:
        self._outbox = outbox
        self._pipeline = pipeline
        self._has_ended = False
        run, study = os.environ.get(settings.RUN_VARIABLE), os.environ.get(settings.STUDY_VARIABLE)
        tags = {**(tags or {}), "leash.dirty": str(pipeline.dirty).lower(), "mlflow.source.name": "leash"}
        if pipeline.commit:
            tags |= {"leash.commit": pipeline.commit, "mlflow.source.git.commit": pipeline.commit}
        tags |= {"leash.experiment": run} if run else {}
        tags |= {"leash.round": str(pipeline.round)} if pipeline.round > 1 else {}
        tags |= {"leash.changes": ", ".join(pipeline.changes)[:5000]} if pipeline.changes else {}
        outbox.append(
            "parent-open", key=pipeline.key, params=flatten(pipeline.params), tags=tags, workspace=workspace,
            name=run or pipeline.title, study=study, note=pipeline.note({}),
        )  # fmt: skip

    def headline(self, metrics: Mapping[str, float | None]) -> None:
        """Metrics of the pipeline run; None is left out."""
        self._outbox.append("headline", metrics=_numbers(metrics))

    def seconds(self, stages: Mapping[str, float]) -> None:
        """Seconds of stages of the pipeline run; MLflow gets their sum over all stages that it has had."""
        self._outbox.append("seconds", stages={stage: round(took, 1) for stage, took in stages.items()})

    def describe(self, headline: Mapping[str, float | None], report: Path | None) -> None:
        """The description of the pipeline run with its result, and the page of the report as its artifact."""
        self._outbox.append("note", text=self._pipeline.note(headline), report=report is not None)
        if report is not None and (place := self._outbox.keep(report)):
            self._outbox.append("artifact", file=place, folder="report", parent=True)

    def dataset(self, name: str, path: str | Path, digest: str, context: str) -> None:
        """A dataset of the pipeline run, with its path and DVC hash."""
        self._outbox.append("inputs", name=name, path=str(path), digest=digest[:36], context=context, parent=True)

    def link_restored(self, stage: str, stage_key: str) -> None:
        """Tag the pipeline run with the run that made the restored outputs of `stage`."""
        self._outbox.append("restored", stage=stage, stage_key=stage_key)

    def close_parent(self, status: Status) -> None:
        """End the pipeline run; a stage that starts later opens it again."""
        self._has_ended = True
        self._outbox.append("parent-close", status=status)


class PipelineTracker(_ParentRun):
    """The pipeline run, for the flow. It has no sender: `drain` sends its events."""

    @classmethod
    def open(
        cls, root: Path, pipeline: PipelineIdentity, *, tags: Mapping[str, str] | None = None, warn: Warn | None = None
    ) -> Self:
        """Start or reopen the parent run of `pipeline` with additional `tags`."""
        workspace = settings.workspace_id(root)
        outbox = Outbox.create(root, f"pipeline-{pipeline.key[:12]}-{workspace}", warn or warn_once())
        return cls(outbox, pipeline, workspace, tags or {})

    def close(self) -> None:
        """Release the outbox; without `close_parent` before it the pipeline run counts as killed."""
        self._outbox.close()


class Tracker(_ParentRun):
    """The run of one stage, nested in its pipeline run."""

    def __init__(
        self,
        root: Path,
        outbox: Outbox,
        stage: str,
        stage_key: str,
        pipeline: PipelineIdentity,
        workspace: str,
        sender: SenderProcess | None,
        send_rest: Callable[[bool], None] | None = None,
        continues: bool = False,
    ) -> None:
        super().__init__(outbox, pipeline, workspace)
        self._root = root
        self._stage = stage
        self._sender = sender
        self._send_rest = send_rest
        self._closed = False
        tags = {"mlflow.source.name": f"tasks.{stage}", "mlflow.source.type": "LOCAL"}
        if user := os.environ.get("USER"):
            tags["mlflow.user"] = user
        if pipeline.commit:
            tags["mlflow.source.git.commit"] = pipeline.commit
        outbox.append("run-open", stage=stage, stage_key=stage_key, tags=tags, continues=continues, workspace=workspace)

    @classmethod
    def open(
        cls,
        root: Path,
        stage: str,
        stage_key: str,
        pipeline: PipelineIdentity,
        *,
        uri: str | None = None,
        send: bool = True,
        sender_after: float | None = None,
        system_seconds: float = SYSTEM_SECONDS,
        warn: Warn | None = None,
        continues: bool = False,
    ) -> Self:
        """Start or continue the run of a stage.

        The caller must hold the lock of the stage's state folder. A run of this key that is not FINISHED is continued
        under its run id; with `continues` also a FINISHED one. `uri` overrides MLflow's address, `sender_after` the
        seconds before a sender starts; with `send=False` only a later `drain` sends; every `system_seconds` (0:
        never) the sender takes a sample of system metrics.
        """
        warn = warn or warn_once()
        workspace = settings.workspace_id(root)
        outbox = Outbox.create(root, f"{stage}-{stage_key[:12]}-{workspace}", warn)
        address = uri or settings.tracking_uri(root)
        send = send and not settings.is_held_back()
        wait = SENDER_AFTER_SECONDS if sender_after is None else sender_after
        sender = SenderProcess(root, outbox.folder, address, warn, wait, system_seconds) if send else None
        rest = partial(send_rest, root, address, warn) if send and not settings.has_driver() else None
        return cls(root, outbox, stage, stage_key, pipeline, workspace, sender, rest, continues)

    def metrics(self, values: Mapping[str, float | None], step: int) -> None:
        """Metrics of a step; None is left out. Steps that an earlier process has logged are dropped."""
        self._outbox.append("metrics", metrics=_numbers(values), step=int(step))

    def figures(self, values: Mapping[str, float | None]) -> None:
        """Final figures of the stage's run; None is left out."""
        self._outbox.append("metrics", metrics=_numbers(values), step=0)

    def model(self, name: str, kind: str, metrics: Mapping[str, float | None], step: int = 0, md5: str = "") -> None:
        """A model of the pipeline run for MLflow's list of models, with its metrics on the prompts of this stage, and
        its DVC hash; `kind` is what it is compared as, `step` orders the models of one stage."""
        name = NOT_IN_MODELS.sub("_", name)[:250]
        self._outbox.append(
            "model", name=name, type=kind, metrics=_numbers(metrics), step=int(step), md5=md5,
            prompts=self._stage,
        )  # fmt: skip

    def params(self, params: Mapping[str, Any]) -> None:
        """Nested parameters of the stage; the first value of a name is kept."""
        self._outbox.append("params", params=flatten(params))

    def tags(self, tags: Mapping[str, str]) -> None:
        """Tags of the stage's run; the last value of a name is kept."""
        self._outbox.append("tags", tags={_name(key): str(value) for key, value in tags.items()})

    def artifact(self, path: Path, folder: str = "") -> None:
        """A file, or all files below a folder, in their present state; a later call replaces them."""
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            inside = Path(folder, file.parent.relative_to(path) if path.is_dir() else "")
            if place := self._outbox.keep(file):
                self._outbox.append("artifact", file=place, folder="" if inside == Path() else inside.as_posix())

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], lead: Sequence[str] = ()) -> None:
        """A table for the evaluation view of MLflow's UI, with the columns of the first row and `lead` first: the view
        groups by the first column and compares runs by the second. Conversations become text."""
        file = NOT_IN_NAMES.sub("_", name).replace("/", "_").removesuffix(".json") + ".json"
        columns = list(dict.fromkeys((*lead, *rows[0]))) if rows else []
        data = [[_cell(row.get(column)) for column in columns] for row in rows]
        text = json.dumps({"columns": columns, "data": data}, ensure_ascii=False, default=str)
        if place := self._outbox.keep_text(file, text):
            self._outbox.append("table", file=place, name=file)

    def inputs(self, name: str, path: str | Path, digest: str) -> None:
        """A dataset that the stage reads, with its path and DVC hash."""
        self._outbox.append("inputs", name=name, path=str(path), digest=digest[:36], context=self._stage)

    def register_policy(self, md5: str, metrics: Mapping[str, float | None]) -> None:
        """Register the policy with DVC hash `md5` as a version of `leash-policy`, with the alias `current`. Its source
        names the project, in whose DVC cache readers find the files."""
        query = urlencode({"md5": md5, "project": settings.main_checkout(self._root).resolve()})
        note, tags = (
            self._pipeline.note(metrics),
            {"leash.commit": self._pipeline.commit} if self._pipeline.commit else {},
        )
        self._outbox.append(
            "register", source=f"dvc://models/policy?{query}", metrics=_numbers(metrics), note=note, tags=tags
        )

    def close(self, status: Status = "FINISHED", timeout: float = 0.0) -> bool:
        """End the run; waits up to `timeout` seconds for the sender and returns whether all events have arrived.

        Sends all outboxes if the pipeline run has ended with this stage and `leash run` is not the driver.
        """
        if self._closed:
            return True
        self._closed = True
        self._outbox.append("run-close", status=status)
        self._outbox.close()
        arrived = self._sender is not None and self._sender.finish(timeout)
        if self._has_ended and self._send_rest is not None:
            self._send_rest(status == "FINISHED")
        return arrived


def begin_study(root: Path, study: str) -> str:
    """Open the study's run, which its trials become children of; workers that begin at once would each make one.
    Returns a line where something is left to send."""
    outbox = Outbox.create(root, f"study-{study}", warn_once())
    outbox.append("study-open", study=study)
    outbox.close()
    return str(drain(root))


def finish_study(
    root: Path, study: str, status: Status, metrics: Mapping[str, float | None], files: Sequence[Path]
) -> str:
    """End the study's run with these metrics and files, and send all that waits; a line where some is left."""
    outbox = Outbox.create(root, f"study-{study}", warn_once())
    kept = [place for path in files if path.is_file() and (place := outbox.keep(path))]
    outbox.append("study-close", study=study, status=status, metrics=_numbers(metrics), files=kept)
    outbox.close()
    return str(drain(root))


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested parameters as dotted names and text: {"ppo": {"kl": {"coef": 0.1}}} gives {"ppo.kl.coef": "0.1"}.

    Values except text are written as JSON; values of secret keys are hidden.
    """
    flat: dict[str, str] = {}
    for key, value in params.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        elif is_secret(name):
            flat[_name(name)] = HIDDEN
        else:
            flat[_name(name)] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def _numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {_name(key): float(value) for key, value in metrics.items() if value is not None}


def _name(text: str) -> str:
    """`text` with the characters and the length that MLflow allows in names."""
    return NOT_IN_NAMES.sub("_", text)[:250]


def _cell(value: Any) -> Any:
    """A cell without NaN, and a conversation as text."""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "content" in one for one in value):
        return as_text(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
