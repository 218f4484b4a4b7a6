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
from tasks.params.loader import PARAMS_FILE, parse_yaml, with_derived
from tasks.params.scorer import REWARD_MODEL
from tasks.records.recorded import params_behind, parse, read_results
from tasks.stage.dvc_adapter import stored_files
from tasks.stage.dvc_files import LOCK_FILE
from tasks.tracking import settings
from tasks.tracking.defaults import filled
from tasks.tracking.record import flatten

EVALUATION = "metrics/evaluate.json"
ANSWERS = "data/evaluate/answers.jsonl"
STAGE = "evaluate"
IDENTITY = re.compile(r"[0-9a-f]{6,32}")
"""An id in MLflow, or its beginning."""
MOST_RUNS = 50_000
"""MLflow's own limit of a search."""
EMPTY = "{}"
"""A block that the file does not have."""
UNCOMPARED = ("runtime.", "report.", "promote.", "raw_files.", "answers.", "sft_enabled")
"""Parameters that change no figure, or follow from others."""


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

    Raises UserError where there is none, or more than one in MLflow, and where its figures cannot be read.
    """
    files, folder = (EVALUATION, LOCK_FILE, PARAMS_FILE), root if name == "." else Path(name).expanduser()
    if folder.is_dir():
        texts = [(folder / file).read_text("utf-8", "replace") if (folder / file).is_file() else "" for file in files]
        if not texts[0]:
            raise UserError(
                f"{folder / EVALUATION}: file not found; there `dvc pull {EVALUATION}` fetches it, where a remote has "
                "it, and `leash run evaluate` makes it"
            )
        source = "this checkout" if name == "." else f"folder {folder}"
        return _of_files(folder, name, source, texts, f"{folder}/", folder / ANSWERS)
    commit = git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").strip()
    source = f"git {commit[:8]}"
    if not commit:
        words = ("--sort=-committerdate", "--count=1", "--format=%(objectname)")
        commit, source = git(root, "for-each-ref", *words, f"refs/exps/*/*/{name}").strip(), "DVC experiment"
    if commit:
        evaluation = read_results(root, commit, EVALUATION).get(EVALUATION)
        if not evaluation:
            raise UserError(f"{name}: commit {commit[:8]} has no {EVALUATION}")
        others = (git(root, "show", f"{commit}:./{file}") for file in files[1:])
        texts = [evaluation.decode("utf-8", "replace"), *others]
        return _of_files(root, name, source, texts, f"{name}:")
    runs, where = runs_in_mlflow(root)
    found = [run for run in runs if IDENTITY.fullmatch(name) and run.info.run_id.startswith(name)]
    found = found or [run for run in runs if run.info.run_name == name]
    if len(found) > 1:
        several = ", ".join(run.info.run_id for run in found[:5])
        raise UserError(f"{name}: {len(found)} runs in MLflow have this name; use an id: {several}")
    if not found:
        raise UserError(
            f"{name}: no run; tried a folder, a revision of git, a DVC experiment, and {where}; `leash runs` lists all"
        )
    return _of_mlflow(root, name, found[0])


def _of_files(
    root: Path, name: str, source: str, texts: list[str], place: str, answers: Path | None = None
) -> Compared:
    """The run of these texts of metrics/evaluate.json, dvc.lock and params.yaml, read from `place`.

    Its parameters are those of dvc.lock, because params.yaml may have been edited since. Its answers are those of the
    file `answers`, else those that dvc.lock names. Raises UserError for a text that cannot be read.
    """
    evaluation, lock, written = texts
    records = parse(lock, f"{place}{LOCK_FILE}") if lock else {}
    content = parse_yaml(written, Path(f"{place}{PARAMS_FILE}")) if written else None
    params = None if content is None else comparable(flatten(with_derived(content)))
    digest = None
    if STAGE in records:
        digest = records[STAGE].outs.get(ANSWERS)
        tracked = params_behind(records, STAGE)
        known = None if tracked is None else comparable(flatten(tracked))
        if tracked is None or known is None:
            source += f", whose {LOCK_FILE} records newer results than these figures were made from"
        elif params is not None:
            behind = tuple(f"{block}." for block in tracked)
            if _below(behind, params) != _below(behind, known):
                source += f", whose {PARAMS_FILE} was edited since"
        params = known
    rows = read_jsonl(answers) if answers and answers.is_file() else _stored(root, digest)
    return Compared(name, source, _parsed(evaluation, f"{place}{EVALUATION}"), params, rows)


def _below(blocks: tuple[str, ...], params: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in params.items() if f"{key}.".startswith(blocks)}


def _of_mlflow(root: Path, name: str, run: Any) -> Compared:
    """The run of `evaluate`, or of a pipeline: the newest finished `evaluate` below it, else the one that made what DVC
    restored. Its answers are those with the hash in its tag."""
    client = _client(settings.tracking_uri(root))
    if run.data.tags.get("leash.stage") == STAGE:
        evaluate, parent = run, run.data.tags.get("mlflow.parentRunId")
        params = client.get_run(parent).data.params if parent else {}
    else:
        query = f"tags.`mlflow.parentRunId` = '{run.info.run_id}' and tags.`leash.stage` = '{STAGE}'"
        query += " and attributes.status = 'FINISHED'"
        order = ["attributes.start_time DESC"]
        below = client.search_runs([run.info.experiment_id], query, max_results=1, order_by=order)
        maker = run.data.tags.get(f"leash.restored.{STAGE}", "untracked")
        if not below and maker == "untracked":
            raise UserError(f"{name}: pipeline run {run.info.run_id} has no finished run of {STAGE}")
        evaluate, params = below[0] if below else client.get_run(maker), run.data.params
    identity = evaluate.info.run_id
    with TemporaryDirectory() as place:
        try:
            content = Path(client.download_artifacts(identity, EVALUATION, place)).read_text("utf-8")
        except Exception as error:
            raise UserError(f"{name}: run {identity} has no artifact {EVALUATION}; it may be an older one") from error
    answers = _stored(root, evaluate.data.tags.get(settings.OUT_TAG + ANSWERS))
    evaluation = _parsed(content, f"{identity}:{EVALUATION}")
    return Compared(name, f"MLflow run {identity}", evaluation, comparable(params) or None, answers)


def _stored(root: Path, digest: str | None) -> list[Row] | str:
    """The answers with this hash, from DVC's cache or its remote; or why they are missing."""
    if not digest:
        return f"neither its {LOCK_FILE} nor its run in MLflow names {ANSWERS}"
    try:
        return read_jsonl(stored_files(root, digest)[""].path)
    except UserError as error:
        return f"{ANSWERS} with hash {error}"


def _parsed(text: str, where: str) -> Mapping[str, Any]:
    try:
        content: dict[str, Any] = json.loads(text)
        usable = bool(content["models"]) and all(isinstance(one, dict) for one in content["models"].values())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{where}: no result of `evaluate` ({error}); run it there again") from error
    if not usable:
        raise UserError(f"{where}: holds no `models` to compare; run `evaluate` there again")
    return content


def comparable(params: Mapping[str, str]) -> dict[str, str]:
    """The parameters that can change a figure, with the defaults of those that params.yaml lacks. A method's block with
    only `enabled: false` is the same as none."""
    blocks = Counter(key.partition(".")[0] for key in params)
    alone = [name for name, keys in blocks.items() if keys == 1 and name != "sft"]
    off = {f"{name}.enabled" for name in alone if params.get(f"{name}.enabled") == "false"}
    return {
        key: value
        for key, value in filled({key: value for key, value in params.items() if key not in off}).items()
        if not (key == REWARD_MODEL or value == EMPTY or key.startswith(UNCOMPARED))
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
        runs = client.search_runs([experiment.experiment_id], max_results=MOST_RUNS) if experiment else []
    except Exception as error:  # MLflow has many types for errors of a server or database
        reason = settings.without_credentials(str(error)).strip().split("\n")[0][:160]
        return [], f"{where} (which does not answer: {reason})"
    known = [run for run in runs if run.data.tags.get("leash.stage", STAGE) == STAGE]
    return known, f"{where} (id, beginning of an id, or name)"


def _client(uri: str) -> Any:
    settings.prepare_environment()
    from mlflow.tracking import MlflowClient  # a second

    return MlflowClient(uri, registry_uri=uri)
