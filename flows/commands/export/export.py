"""`leash export`: a copy of a model with a model card, which is made from its provenance and the metrics of its run."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from mlflow.exceptions import MlflowException

from flows.text import dotted
from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from tasks.dvc_artifacts import MLMODEL, DvcArtifactRepository
from tasks.page.comparison_table import COLUMNS, cells, columns_of, label
from tasks.page.inputs import METRICS, Run, finite, interval, read_run
from tasks.page.verdicts import doubts
from tasks.params.evaluate import EvaluateParams
from tasks.params.loader import parse as parse_params
from tasks.params.methods import BY_NAME, VARIANTS
from tasks.records.recorded import Record, made_by, params_behind, parse
from tasks.stage import provenance
from tasks.stage.dvc_files import LOCK_FILE, Project, open_project, read_lock_file

CARD, PROVENANCE = "README.md", "provenance.json"
HEADLINES = ("win_rate", "win_rate_controlled", "gold", "reward", "kl")
"""The figures in the card's metadata, which the hub shows."""
LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md")


def export(root: Path, folder: Path, target: Path) -> str:
    """Copy the model in `folder`, a model of the last run, to `target` with a card; return one line about it. The copy
    is complete or absent, and loads with transformers and with MLflow.

    Raises UserError for a folder that the evaluation does not compare, where one of model, provenance and metrics is
    not the one that dvc.lock names, and for a `target` that is not empty or that stages read.
    """
    folder, target = folder.resolve(), target.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: is there already; remove it, or name another folder")
    with open_project(root) as project:
        files = [file.place for stage in project.stages for file in (*stage.inputs, *stage.outs)]
        if taken := next((place for place in files if target.is_relative_to(place.resolve())), None):
            raise UserError(f"{target}: the pipeline uses {taken.relative_to(project.root)}; name a folder outside it")
        path = folder.relative_to(root.resolve()).as_posix() if folder.is_relative_to(root.resolve()) else str(folder)
        records = parse(read_lock_file(root) or "", LOCK_FILE)
        digest = require_measured(project, records, path)
    run = read_run([], [], root)
    name, params = folder.name, params_behind(records, "evaluate")
    if name not in run.models:
        raise UserError(f"{path}: metrics/evaluate.json compares {', '.join(run.models)}; name one of them")
    if params is None:
        raise UserError(f"{LOCK_FILE}: what {path} was made from has been made again since; `leash run` makes it again")
    uri = f"dvc://{path}?md5={digest}&project={quote(str(root.absolute()))}"
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic(target) as fresh:
            fresh.mkdir()
            DvcArtifactRepository(uri).download_artifacts(dst_path=str(fresh))
            shutil.copyfile(provenance.path_of(folder), fresh / PROVENANCE)
            text = card(root, fresh, run, name, digest, records, provenance.without_secrets(params))
            (fresh / CARD).write_text(text, encoding="utf-8")
    except MlflowException as error:
        raise UserError(f"{path}: {error.message}") from None
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error}); name another folder") from None
    return f"{target}: {path} ({digest[:8]}) with its card, {CARD}"


def require_measured(project: Project, records: Mapping[str, Record], path: str) -> str:
    """DVC's hash of the model at `path`. Raises UserError unless the evaluation is of this very model, and provenance
    and metrics are those that dvc.lock names."""
    evaluation = records.get("evaluate")
    known = [name for name in (evaluation.inputs if evaluation else ()) if name.startswith("models/")]
    if evaluation is None or path not in known:
        listed = ", ".join(known) or "nothing yet; `leash run` does"
        raise UserError(f"{path}: is not among the models that the run evaluates; {LOCK_FILE} has {listed}")
    measured, present = evaluation.inputs[path], project.hash_at(project.root / path)
    if present is None:
        raise UserError(f"{path}: folder not found; `leash run` makes it, `dvc pull` fetches it")
    if present != measured:
        raise UserError(
            f"{path}: has the hash {present}, and metrics/evaluate.json is of the model with the hash {measured}; "
            "`leash run` evaluates the present one"
        )
    outs = {out: value for record in records.values() for out, value in record.outs.items()}
    for file in (f"{path}{provenance.SUFFIX}", *(f"metrics/{stage}.json" for stage in METRICS)):
        found, recorded = project.hash_at(project.root / file), evaluation.inputs.get(file) or outs.get(file)
        if found != recorded or recorded is None:
            raise UserError(
                f"{file}: has the hash {found or 'of no file'}, and the evaluated model's is {recorded or 'unknown'}; "
                "`leash run` makes them agree"
            )
    return present


def card(
    root: Path, fresh: Path, run: Run, name: str, digest: str, records: Mapping[str, Record], params: Mapping[str, Any]
) -> str:
    """The text of the card of the copy in `fresh`. A licence file of the base model is copied there."""
    config = json.loads((fresh / "config.json").read_text(encoding="utf-8"))
    own = json.loads((fresh / PROVENANCE).read_text(encoding="utf-8"))
    base, ingest = params["base"], params["ingest"]
    licence, about_licence = licence_of(root, fresh, base)
    pretrained = base["pretrained"] if base["source"] == "pretrained" else {}
    named = ingest["huggingface"] if ingest["source"] == "huggingface" else {}
    raw, base_model = root / "data/raw", pretrained.get("model")  # a folder there has priority over an id of the hub
    from_hub = base_model is not None and not (raw / base_model).exists()
    dataset = named["dataset"] if named and not (raw / named["dataset"]).exists() else None

    shown = {one: run.models[one] for one in dict.fromkeys(("sft", name))}
    rows = []
    for column in columns_of(shown):
        texts = [f"{c.text} ({c.low} to {c.high})" if c.low else c.text for c in cells(shown, column).values()]
        rows.append((column.name, column.unit, *texts))
    names = {column.key: column.name for column in COLUMNS}
    results = [
        EvalResult(
            task_type="text-generation", dataset_type="leash", dataset_name=f"{run.evaluation['prompts']} prompts",
            metric_type=key, metric_name=f"{names[key]}{between(run.models[name], key)}", metric_value=value,
        )
        for key in HEADLINES
        if (value := finite(run.models[name].get(key))) is not None
    ]  # fmt: skip
    method = "ppo" if name == "policy" else name
    data = ModelCardData(
        base_model=base_model if from_hub else None, datasets=[str(dataset)] if dataset else None,
        library_name="transformers", pipeline_tag="text-generation", tags=["rlhf", method, "leash"], model_name=name,
        eval_results=results, **licence,
    )  # fmt: skip

    chain, waiting = dict[str, Record](), [next(one for one in records.values() if one.stage == own["stage"])]
    while waiting:
        record = waiting.pop()
        chain[record.stage] = record
        made = (made_by(records, path, value) for path, value in record.inputs.items())
        waiting += [maker for maker in made if maker is not None and maker.stage not in chain]
    wanted = {*chain, *chain[own["stage"]].params}  # variants of PPO read its block without its stage
    blocks = {one: params[one] for one in (*records, *params) if one in wanted and isinstance(params.get(one), Mapping)}
    settings = [
        (
            stage,
            " ".join(
                f"{key}={' '.join(str(value).split()).replace('|', chr(92) + '|')}"
                for key, value in dotted(block).items()
            ),
        )
        for stage, block in blocks.items()
    ]
    lora = any(blocks.get(one, {}).get("lora") for one in ("sft", "ppo" if name in VARIANTS else method))
    sampling = parse_params(EvaluateParams, params["evaluate"], "evaluate")
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True,
        keep_trailing_newline=True, autoescape=False,  # it is Markdown
    ).get_template("card.md.j2")  # fmt: skip
    return template.render(
        metadata=data.to_yaml(line_break="\n"), name=name, title=label(name, run.models), run=run, digest=digest,
        architecture=", ".join(config.get("architectures") or ["unknown"]), code="auto_map" in config, own=own,
        mlflow=(fresh / MLMODEL).is_file(),
        base=f"{base_model} at {pretrained['revision']}" if from_hub else base_model, about_licence=about_licence,
        meaning=BY_NAME[name].meaning if name in BY_NAME else "", lora=lora, settings=settings,
        source="demo" if ingest["source"] == "demo" else f"{dataset} at {named['revision']}" if dataset else "files",
        text=base.get("format") == "text", sampling=sampling, headings=[label(one, run.models) for one in shown],
        rows=rows, doubts=doubts(run), evaluation=records["evaluate"].outs["metrics/evaluate.json"],
        ingest=run.metrics["ingest"],
        raw=records["ingest"].inputs.get("data/raw") if ingest["source"] != "demo" else None, seed=params.get("seed"),
    )  # fmt: skip


def licence_of(root: Path, fresh: Path, base: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The licence of the base model as the hub's metadata have it, and in words. It is read from the base model's
    folder below data/raw/, whose licence file is copied to `fresh`; for a model of the hub it is a link. Raises
    UserError where that folder is missing."""
    if base["source"] != "pretrained":
        return {}, "No base model: it was trained from random weights. Who shares it chooses its licence."
    model, folder = str(base["pretrained"]["model"]), root / "data/raw" / base["pretrained"]["model"]
    if not folder.exists() and not base["pretrained"].get("revision"):
        raise UserError(
            f"data/raw/{model}: not here, and the card needs the base model's licence; `dvc pull` fetches it"
        )
    if not folder.exists():
        page = f"https://huggingface.co/{model}"
        named = {"license": "other", "license_name": "base-model", "license_link": page}
        return named, f"The base model's licence holds for this model, too. It was not copied: see {page}."
    folder = folder if folder.is_dir() else folder.parent
    file = next((name for name in LICENCES if (folder / name).is_file()), None)
    if file:
        shutil.copyfile(folder / file, fresh / file)
    found = ModelCard.load(folder / CARD, ignore_metadata_errors=True).data if (folder / CARD).is_file() else None
    if found is not None and isinstance(found.license, str):
        kept = {key: getattr(found, key) for key in ("license", "license_name", "license_link")}
        text = f"The base model's licence, `{found.license}`, holds for this model, too."
        return {key: value for key, value in kept.items() if value}, f"{text} See {file}." if file else text
    if file:
        named = {"license": "other", "license_name": "base-model", "license_link": file}
        return named, f"The base model's licence holds for this model, too: see {file}."
    return {}, "The base model came without a licence: look it up before you share this model."


def between(figures: Mapping[str, Any], key: str) -> str:
    """The 95% interval of a figure in brackets; empty where it has none."""
    ends = interval(figures, key)
    return "" if ends is None else f" (95% interval {ends[0]:.4g} to {ends[1]:.4g})"
