"""Finds a run by its name, which is a folder, a revision of git, a DVC experiment or a run in MLflow, and reads its
results."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flows import workspace
from rlhf_core.errors import UserError
from tasks.datasets.jsonl import Row, read_jsonl
from tasks.naming import experiment_name
from tasks.params.loader import NUMERICS, PARAMS_FILE, parse_yaml, with_derived
from tasks.params.scorer import DEFAULT, REWARD_MODEL
from tasks.records.recorded import params_behind, parse
from tasks.stage.dvc_adapter import stored_files
from tasks.stage.dvc_files import LOCK_FILE
from tasks.tracking import settings
from tasks.tracking.record import flatten

EVALUATION = "metrics/evaluate.json"
ANSWERS = "data/evaluate/answers.jsonl"
SHORTEST_PREFIX = 6
STAGE = "evaluate"
EMPTY = "{}"
"""A block that the file does not have."""
UNCOMPARED = ("runtime.", "report.", "promote.", "raw_files.")
"""Parameters that change no figure, or follow from others."""
DEFAULTS = flatten({**NUMERICS, "scorer": DEFAULT})
"""Parameters that params.yaml may lack, as dvc.lock has them then."""


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
    """The run called `name`: the first of a folder, a revision of git, a DVC experiment, and a run in MLflow.

    Raises UserError where there is none, or more than one in MLflow.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _of_folder(root if name == "." else folder, name)
    if commit := git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").strip():
        return _of_commit(root, name, commit, f"git {commit[:8]}")
    newest = git(root, "for-each-ref", "--sort=-committerdate", "--format=%(objectname)", f"refs/exps/*/*/{name}")
    if newest:
        return _of_commit(root, name, newest.split()[0], "DVC experiment")
    runs, where = runs_in_mlflow(root)
    is_id = re.fullmatch(rf"[0-9a-f]{{{SHORTEST_PREFIX},32}}", name)
    found = [run for run in runs if is_id and run.info.run_id.startswith(name)]
    found = found or [run for run in runs if run.info.run_name == name]
    if len(found) > 1:
        several = ", ".join(run.info.run_id for run in found[:5])
        raise UserError(f"{name}: {len(found)} runs in MLflow have this name; use an id: {several}")
    if not found:
        raise UserError(
            f"{name}: no run; tried a folder, a revision of git, a DVC experiment, and {where}; `leash runs` lists all"
        )
    return _of_run(root, name, found[0])


def _of_folder(folder: Path, name: str) -> Compared:
    path, lock = folder / EVALUATION, folder / LOCK_FILE
    if not path.is_file():
        raise UserError(f"{path}: file not found; `dvc repro evaluate` in that folder writes it")
    evaluation = _parsed(path.read_text(encoding="utf-8"), str(path))
    params = folder / PARAMS_FILE
    text = lock.read_text(encoding="utf-8", errors="replace") if lock.is_file() else ""
    written = params.read_text(encoding="utf-8", errors="replace") if params.is_file() else ""
    known, note = _parameters(text, str(lock), written, params)
    answers = read_jsonl(folder / ANSWERS) if (folder / ANSWERS).is_file() else _stored(folder, _recorded(text))
    return Compared(name, ("this checkout" if name == "." else f"folder {folder}") + note, evaluation, known, answers)


def _of_commit(root: Path, name: str, commit: str, source: str) -> Compared:
    lock = git(root, "show", f"{commit}:./{LOCK_FILE}")
    text = git(root, "show", f"{commit}:./{EVALUATION}")
    if not text:
        raise UserError(f"{name}: commit {commit[:8]} has no {EVALUATION}")
    written = git(root, "show", f"{commit}:./{PARAMS_FILE}")
    params, note = _parameters(lock, f"{name}:{LOCK_FILE}", written, Path(f"{name}:{PARAMS_FILE}"))
    evaluation = _parsed(text, f"{name}:{EVALUATION}")
    return Compared(name, f"{source}{note}", evaluation, params, _stored(root, _recorded(lock)))


def _of_run(root: Path, name: str, run: Any) -> Compared:
    """A run in MLflow. Its answers are those with the hash in its tag."""
    client = _client(settings.tracking_uri(root))
    evaluate = run if run.data.tags.get("leash.stage") == STAGE else _evaluate_of(client, name, run)
    parent = evaluate.data.tags.get("mlflow.parentRunId")
    params = run.data.params if evaluate is not run else client.get_run(parent).data.params if parent else {}
    identity = evaluate.info.run_id
    with TemporaryDirectory() as place:
        try:
            content = Path(client.download_artifacts(identity, EVALUATION, place)).read_bytes()
        except Exception as error:
            raise UserError(f"{name}: run {identity} has no artifact {EVALUATION}; it may be an older one") from error
    evaluation = _parsed(content.decode("utf-8"), f"{identity}:{EVALUATION}")
    digest = evaluate.data.tags.get(settings.OUT_TAG + ANSWERS)
    return Compared(name, f"MLflow run {identity}", evaluation, comparable(params) or None, _stored(root, digest))


def _recorded(lock: str) -> str | None:
    """The hash of the answers in the text of a dvc.lock."""
    record = parse(lock, LOCK_FILE).get(STAGE) if lock else None
    return record.outs.get(ANSWERS) if record else None


def _stored(root: Path, digest: str | None) -> list[Row] | str:
    """The answers with this hash, from DVC's cache or its remote; or why they are missing."""
    if not digest:
        return f"neither its {LOCK_FILE} nor its run in MLflow names {ANSWERS}"
    try:
        return read_jsonl(stored_files(root, digest)[""].path)
    except UserError as error:
        return f"{ANSWERS} with hash {error}"


def _parameters(lock: str, source: str, written: str, file: Path) -> tuple[Mapping[str, str] | None, str]:
    """The parameters of the figures, and a note about them. They are those of dvc.lock, because params.yaml may have
    been edited since. Raises UserError for a lock, from `source`, that cannot be read."""
    records = parse(lock, source) if lock else {}
    now = comparable(flatten(with_derived(parse_yaml(written, file)))) if written else None
    if STAGE not in records:
        return now, ""
    tracked = params_behind(records, STAGE)
    if tracked is None:
        return None, f", whose {LOCK_FILE} records newer results than these figures were made from"
    known = comparable(flatten(tracked))
    below = {key: value for key, value in (now or known).items()
             if any(key == name or key.startswith(f"{name}.") for name in tracked)}  # fmt: skip
    return known, "" if below == known else f", whose {PARAMS_FILE} was edited since"


def comparable(params: Mapping[str, str]) -> dict[str, str]:
    """The parameters that can change a figure. A block with only `enabled: false` is the same as none, and a default
    that params.yaml may lack the same as its lack."""
    blocks = Counter(key.partition(".")[0] for key in params)
    off = {f"{name}.enabled" for name, keys in blocks.items() if keys == 1 and params.get(f"{name}.enabled") == "false"}
    return {
        key: value
        for key, value in params.items()
        if not (key in off or key == REWARD_MODEL or value in (EMPTY, DEFAULTS.get(key)) or key.startswith(UNCOMPARED))
    }


def git(root: Path, *words: str) -> str:
    """What git prints; empty where it fails, or is not there."""
    try:
        return workspace.git(root, *words)
    except (UserError, OSError):
        return ""


def runs_in_mlflow(root: Path) -> tuple[list[Any], str]:
    """The newest pipeline runs and runs of `evaluate` in MLflow, and where was searched."""
    uri = settings.tracking_uri(root)
    where = f"MLflow at {settings.without_credentials(uri)}"
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        return [], f"{where} (not there yet)"
    try:
        client = _client(uri)
        experiment = client.get_experiment_by_name(experiment_name(root))
        runs, token = [], None
        while experiment is not None:
            page = client.search_runs([experiment.experiment_id], max_results=1000, page_token=token)
            runs += [run for run in page if run.data.tags.get("leash.stage", STAGE) == STAGE]
            token = page.token
            if not token:
                break
    except Exception as error:  # MLflow has many types for errors of a server or database
        reason = settings.without_credentials(str(error)).strip().split("\n")[0][:160]
        return [], f"{where} (which does not answer: {reason})"
    return runs, f"{where} (id, beginning of an id, or name)"


def _client(uri: str) -> Any:
    settings.prepare_environment()
    from mlflow.tracking import MlflowClient  # a second

    return MlflowClient(uri, registry_uri=uri)


def _evaluate_of(client: Any, name: str, pipeline: Any) -> Any:
    """The newest finished run of `evaluate` below a pipeline run; else the one that made what DVC restored."""
    query = f"tags.`mlflow.parentRunId` = '{pipeline.info.run_id}' and tags.`leash.stage` = '{STAGE}'"
    query += " and attributes.status = 'FINISHED'"
    order = ["attributes.start_time DESC"]
    if found := client.search_runs([pipeline.info.experiment_id], query, max_results=1, order_by=order):
        return found[0]
    maker = pipeline.data.tags.get(f"leash.restored.{STAGE}", "untracked")
    if maker == "untracked":
        raise UserError(f"{name}: pipeline run {pipeline.info.run_id} has no finished run of {STAGE}")
    return client.get_run(maker)


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
