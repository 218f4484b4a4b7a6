"""Finds a run by its name, which is a folder, a revision of git, or a run in MLflow, and reads its results."""

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row, read_jsonl
from tasks.naming import experiment_name
from tasks.params.loader import PARAMS_FILE, read_yaml
from tasks.records.recorded import params_behind, parse
from tasks.stage.dvc_adapter import LOCK_FILE, open_project
from tasks.tracking import settings
from tasks.tracking.record import flatten

EVALUATION = "metrics/evaluate.json"
ANSWERS = "data/evaluate/answers.jsonl"
SHORTEST_PREFIX = 6
STAGE = "evaluate"
EMPTY = "{}"
"""A block that the file does not have."""
UNCOMPARED = ("runtime.", "report.")
"""Parameters that change no figure."""


@dataclass(frozen=True)
class Compared:
    """One run: its name, the source of its figures, and the figures."""

    name: str
    source: str
    evaluation: Mapping[str, Any]
    """The content of metrics/evaluate.json."""
    params: Mapping[str, str] | None
    """The parameters of the figures by dotted name, as JSON; None where they are not known."""
    answers: list[Row] | str
    """The rows of data/evaluate/answers.jsonl, or why they are missing."""


def find(root: Path, name: str) -> Compared:
    """The run called `name`: a folder, else a revision of git or a run in MLflow.

    Raises UserError where there is none, or more than one.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _of_folder(root if name == "." else folder, name)
    commit = _commit(root, name)
    runs, tried = _runs(root, name)
    if commit and runs:
        raise UserError(f"{name}: a revision of git ({commit[:8]}) and a run in MLflow ({runs[0].info.run_id})")
    if commit:
        return _of_commit(root, name, commit)
    if len(runs) > 1:
        several = ", ".join(run.info.run_id for run in runs[:5])
        raise UserError(f"{name}: {len(runs)} runs in MLflow have this name; use an id: {several}")
    if not runs:
        raise UserError(f"{name}: no run; tried a folder, a revision of git, and {tried}")
    return _of_run(root, name, runs[0])


def _of_folder(folder: Path, name: str) -> Compared:
    path = folder / EVALUATION
    if not path.is_file():
        raise UserError(f"{path}: file not found; `dvc repro evaluate` in that folder writes it")
    evaluation = _parsed(path.read_text(encoding="utf-8"), str(path))
    written = _flat(read_yaml(folder / PARAMS_FILE)) if (folder / PARAMS_FILE).is_file() else None
    lock = folder / LOCK_FILE
    text = lock.read_text(encoding="utf-8", errors="replace") if lock.is_file() else None
    params, note = _parameters(text, str(lock), written)
    source = ("this checkout" if name == "." else f"folder {folder}") + note
    answers = read_jsonl(folder / ANSWERS) if (folder / ANSWERS).is_file() else f"{ANSWERS} is not there"
    return Compared(name, source, evaluation, params, answers)


def _of_commit(root: Path, name: str, commit: str) -> Compared:
    text = _git(root, "show", f"{commit}:./{EVALUATION}")
    if text is None:
        raise UserError(f"{name}: commit {commit[:8]} has no {EVALUATION}")
    evaluation, lock = _parsed(text, f"{name}:{EVALUATION}"), _git(root, "show", f"{commit}:./{LOCK_FILE}")
    params, note = _parameters(lock, f"{name}:{LOCK_FILE}", _params_at(root, commit))
    return Compared(name, f"git {commit[:8]}{note}", evaluation, params, _answers_at(root, lock, f"{name}:{LOCK_FILE}"))


def _answers_at(root: Path, lock: str | None, source: str) -> list[Row] | str:
    """Those that a commit's dvc.lock names, from DVC's cache."""
    record = parse(lock, source).get(STAGE) if lock else None
    digest = record.outs.get(ANSWERS) if record else None
    if not digest:
        return f"its {LOCK_FILE} does not name {ANSWERS}"
    with open_project(root) as project:
        files = [path for _, path in project.cached(digest)]
    return read_jsonl(files[0]) if files else f"{ANSWERS} is not in DVC's cache; `dvc fetch -a evaluate` may have it"


def _params_at(root: Path, commit: str) -> dict[str, str] | None:
    text = _git(root, "show", f"{commit}:./{PARAMS_FILE}")
    if text is None:
        return None
    with TemporaryDirectory() as place:
        path = Path(place) / PARAMS_FILE
        path.write_text(text, encoding="utf-8")
        return _flat(read_yaml(path))


def _parameters(
    lock: str | None, source: str, written: Mapping[str, str] | None
) -> tuple[Mapping[str, str] | None, str]:
    """The parameters of the figures, and a note about them. They are those of dvc.lock, because params.yaml may have
    been edited since. Raises UserError for a lock, from `source`, that cannot be read."""
    records = {} if lock is None else parse(lock, source)
    if STAGE not in records:
        return written, ""
    tracked = params_behind(records, STAGE)
    if tracked is None:
        return None, f", whose {LOCK_FILE} records newer results than these figures were made from"
    known = _flat(tracked)
    now = {
        key: value
        for key, value in (written or known).items()
        if any(key == name or key.startswith(f"{name}.") for name in tracked)
    }
    return known, "" if now == known else f", whose {PARAMS_FILE} was edited since"


def _commit(root: Path, name: str) -> str | None:
    found = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    return found.strip() if found else None


def _git(root: Path, *words: str) -> str | None:
    """What git prints; None where it fails, or is not there."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(["git", *words], cwd=root, env=environment, capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout.decode("utf-8", errors="replace") if done.returncode == 0 else None


def _runs(root: Path, name: str) -> tuple[list[Any], str]:
    """Runs in MLflow with this id, beginning of an id, or name; and where was searched."""
    uri = settings.tracking_uri(root)
    where = f"MLflow at {settings.without_credentials(uri)}"
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        return [], f"{where} (not there yet)"
    try:
        client = _client(uri)
        experiment = client.get_experiment_by_name(experiment_name(root))
        runs = [] if experiment is None else _matching(client, experiment.experiment_id, name)
    except Exception as error:  # MLflow has many types for errors of a server or database
        reason = settings.without_credentials(str(error)).strip().split("\n")[0][:160]
        return [], f"{where} (which does not answer: {reason})"
    return runs, f"{where} (id, beginning of an id, or name)"


def _client(uri: str) -> Any:
    settings.prepare_environment()
    from mlflow.tracking import MlflowClient  # a second

    return MlflowClient(uri, registry_uri=uri)


def _matching(client: Any, experiment: str, name: str) -> list[Any]:
    """Pipeline runs and runs of `evaluate` only."""
    runs, token = [], None
    while True:
        page = client.search_runs([experiment], max_results=1000, page_token=token)
        runs += [run for run in page if run.data.tags.get("leash.stage", STAGE) == STAGE]
        token = page.token
        if not token:
            break
    if re.fullmatch(rf"[0-9a-f]{{{SHORTEST_PREFIX},32}}", name):
        by_id = [run for run in runs if run.info.run_id.startswith(name)]
        if by_id:  # else it may be a commit: runs without changed parameters are named after theirs
            return by_id
    return [run for run in runs if run.info.run_name == name]


def _of_run(root: Path, name: str, run: Any) -> Compared:
    client = _client(settings.tracking_uri(root))
    evaluate = run if run.data.tags.get("leash.stage") == STAGE else _evaluate_of(client, name, run)
    parent = evaluate.data.tags.get("mlflow.parentRunId")
    params = run.data.params if evaluate is not run else client.get_run(parent).data.params if parent else {}
    identity = evaluate.info.run_id
    with TemporaryDirectory() as place:
        try:
            path = Path(client.download_artifacts(identity, EVALUATION, place))
            text = path.read_text(encoding="utf-8")
        except Exception as error:
            raise UserError(f"{name}: run {identity} has no artifact {EVALUATION}; it may be an older one") from error
    compared = _compared(params)
    evaluation = _parsed(text, f"{identity}:{EVALUATION}")
    return Compared(
        name, f"MLflow run {identity}", evaluation, compared or None, "MLflow does not hold the scored answers"
    )


def _evaluate_of(client: Any, name: str, pipeline: Any) -> Any:
    """The newest finished run of `evaluate` below a pipeline run; else the one that made what DVC restored."""
    query = f"tags.`mlflow.parentRunId` = '{pipeline.info.run_id}' and tags.`leash.stage` = '{STAGE}'"
    query += " and attributes.status = 'FINISHED'"
    found = client.search_runs(
        [pipeline.info.experiment_id], query, max_results=1, order_by=["attributes.start_time DESC"]
    )
    if found:
        return found[0]
    maker = pipeline.data.tags.get(f"leash.restored.{STAGE}", "untracked")
    if maker == "untracked":
        raise UserError(f"{name}: pipeline run {pipeline.info.run_id} has no finished run of {STAGE}")
    return client.get_run(maker)


def _flat(params: Mapping[str, Any]) -> dict[str, str]:
    return _compared(flatten(params))


def _compared(params: Mapping[str, str]) -> dict[str, str]:
    """The parameters that can change a figure. A block with only `enabled: false` is the same as none."""
    blocks = Counter(key.partition(".")[0] for key in params)
    off = {f"{name}.enabled" for name, keys in blocks.items() if keys == 1 and params.get(f"{name}.enabled") == "false"}
    left_out = off | {key for key, value in params.items() if value == EMPTY or key.startswith(UNCOMPARED)}
    return {key: value for key, value in params.items() if key not in left_out}


def _parsed(text: str, where: str) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: broken JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(content).__name__}")
    models = content.get("models")
    if not isinstance(models, dict) or not models or not all(isinstance(one, dict) for one in models.values()):
        raise UserError(f"{where}: holds no `models` to compare; run `evaluate` there again")
    return content
