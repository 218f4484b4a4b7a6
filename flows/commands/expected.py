"""`leash check-results`: compares the figures of a run with those that its example should give, stage by stage."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from flows.commands.compare.sources import comparable
from flows.graph import read_graph
from flows.params_file import read_written
from flows.text import dotted, shorten, table
from rlhf_core.config.block import Block, NotNegative
from rlhf_core.errors import UserError, did_you_mean
from rlhf_core.files import atomic
from tasks.params.loader import PARAMS_FILE, parse, read_yaml, with_derived
from tasks.records.recorded import Record, params_behind, recorded
from tasks.stage.dvc_files import md5_of
from tasks.tracking.record import flatten

ENDING = ".expected.yaml"
FIGURES = {
    "sft": ("validation_loss",),
    "reward": ("heldout_accuracy",),
    "ppo": ("reward_last", "kl_last"),
    "evaluate": ("gold_sft", "gold_policy", "reward_policy", "kl_per_sequence", "win_rate"),
}
"""What `write` records of a run, where it is known."""
MOST_KEYS = 8


class _Figure(Block):
    value: float
    tolerance: NotNegative


def check(root: Path, path: Path | None) -> dict[str, Any]:
    """The figures of this checkout beside those of the expected file at `path`, or of that of examples/ which has the
    present parameters, and the first stage that is off. The training seed may be another: tolerances are set to what
    seeds differ by. Raises UserError where they cannot be compared: no such file, other parameters, or figures that
    are missing or of another run."""
    stages = read_graph(root).stages
    ours = _parameters(root / PARAMS_FILE)
    found = {}
    for one in [path] if path else sorted((root / "examples").glob(f"*{ENDING}")):
        params, wanted = _expected(one)
        other = _differences(ours, _parameters(root / params))
        found[one] = params, wanted, [key for key in other if key != "seed"]
    if not found:
        raise UserError(f"examples/*{ENDING}: there is none; `leash check-results --write` makes one from a run")
    path, (params, wanted, other) = min(found.items(), key=lambda item: len(item[1][2]))
    if other:
        keys = ", ".join(other[:MOST_KEYS]) + (f" and {len(other) - MOST_KEYS} more" if len(other) > MOST_KEYS else "")
        raise UserError(
            f"{path}: is for {params}, and {PARAMS_FILE} has other values of {keys}; name a file for these "
            "parameters, or `leash check-results --write` makes one"
        )
    if unknown := [stage for stage in wanted if stage not in stages]:
        raise UserError(f"{path}: {unknown[0]}: no such stage{did_you_mean(unknown[0], stages)}")
    rows, problems = [], []
    records = recorded(root)
    for stage in (stage for stage in stages if stage in wanted):
        try:
            metrics = _metrics(root, stage, records, ours)
        except UserError as error:
            problems.append(str(error))
            continue
        for name, figure in wanted[stage].items():
            value = metrics.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                problems.append(f"metrics/{stage}.json: {name}: no such number{did_you_mean(name, metrics)}")
                continue
            off = value - figure.value
            row = {"stage": stage, "metric": name, "value": value, "expected": figure.value}
            rows.append(row | {"tolerance": figure.tolerance, "off": off, "ok": abs(off) <= figure.tolerance})
    if problems:
        raise UserError(";\n".join(problems))
    first = next((row["stage"] for row in rows if not row["ok"]), None)
    shown = path.relative_to(root) if path.is_relative_to(root) else path
    return {"file": str(shown), "params": params, "first_off": first, "figures": rows}


def render(found: Mapping[str, Any]) -> str:
    """A line for each figure, and the verdict."""
    lines = [["stage", "metric", "value", "expected", "tolerance", ""]]
    for row in found["figures"]:
        numbers = [f"{row[key]:.4g}" for key in ("value", "expected", "tolerance")]
        lines.append([row["stage"], row["metric"], *numbers, "ok" if row["ok"] else f"off by {row['off']:+.4g}"])
    off = [row["metric"] for row in found["figures"] if row["stage"] == found["first_off"] and not row["ok"]]
    verdict = f"the first stage that is off: {found['first_off']} ({', '.join(off)})" if off else "all within tolerance"
    return f"{found['file']}, for {found['params']}\n{table(lines)}\n{verdict}"


def write(root: Path, path: Path | None, tolerance: float) -> str:
    """Write the expected file of the present run, with this relative tolerance; returns where. Raises UserError where
    no file of examples/ has the present parameters, where the figures are missing or of another run, and for a file
    that is there already or cannot be written."""
    ours = _parameters(root / PARAMS_FILE)
    examples = [one for one in sorted((root / "examples").glob("*.yaml")) if "." not in one.stem]
    same = [one for one in examples if not _differences(ours, _parameters(one))]
    if not same:
        raise UserError(
            f"{PARAMS_FILE}: no file of examples/ has these parameters; copy it to examples/NAME.yaml first"
        )
    path = path or same[0].with_name(same[0].stem + ENDING)
    if path.exists():
        raise UserError(f"{path}: is there already, with tolerances set by hand; remove it, or name another file")
    if not math.isfinite(tolerance):
        raise UserError(f"--tolerance {tolerance}: give a number")
    content: dict[str, Any] = {"params": same[0].relative_to(root).as_posix()}
    records = recorded(root)
    for stage, names in FIGURES.items():
        metrics = _metrics(root, stage, records, ours)
        known = {name: metrics[name] for name in names if isinstance(metrics.get(name), float)}
        if known:
            content[stage] = {
                name: {"value": float(f"{value:.5g}"), "tolerance": float(f"{abs(value) * tolerance:.2g}")}
                for name, value in known.items()
            }
    yaml = YAML(typ="safe", pure=True)
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    try:
        with atomic(path) as place, place.open("w", encoding="utf-8") as file:
            yaml.dump(content, file)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name another file") from None
    return f"{path}: written, with tolerances of {tolerance:.0%}; set each to what training seeds differ by"


def _expected(path: Path) -> tuple[str, dict[str, dict[str, _Figure]]]:
    """The parameter file that an expected file is of, relative to the project, and stage → dotted name of a number in
    metrics/STAGE.json → its value and tolerance. Raises UserError for a file of another form."""
    content = read_written(path)
    params = content.pop("params", None)
    blocks = [block for block in content.values() if isinstance(block, dict) and block]
    if not isinstance(params, str) or not blocks or len(blocks) < len(content):
        raise UserError(f"{path}: write `params: FILE`, and for each stage METRIC: {{value: …, tolerance: …}}")
    return params, {
        stage: {name: parse(_Figure, one, f"{stage}.{name}", path) for name, one in block.items()}
        for stage, block in content.items()
    }


def _parameters(path: Path) -> dict[str, str]:
    """Those that can change a figure, with their defaults."""
    return comparable(flatten(with_derived(read_yaml(path))))


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


def _metrics(root: Path, stage: str, records: Mapping[str, Record], params: Mapping[str, str]) -> dict[str, Any]:
    """The content of metrics/STAGE.json by dotted name. Raises UserError where it is missing, and where dvc.lock does
    not say that it was made with these parameters."""
    name = f"metrics/{stage}.json"
    if not (root / name).is_file():
        raise UserError(f"{name}: file not found; `dvc pull {name}` fetches it, and `leash run {stage}` makes it")
    behind = params_behind(records, stage) if stage in records else None
    if behind is None or md5_of(root / name) != records[stage].outs.get(name):
        raise UserError(f"{name}: dvc.lock does not say how it was made; `leash run {stage}` makes it")
    blocks = tuple(f"{block}." for block in behind)
    now = {key: value for key, value in params.items() if f"{key}.".startswith(blocks)}
    then = {key: value for key, value in comparable(flatten(behind)).items() if f"{key}.".startswith(blocks)}
    if changed := _differences(now, then):
        was = f"{changed[0]} {shorten(then.get(changed[0], 'unset'))}, now {shorten(now.get(changed[0], 'unset'))}"
        raise UserError(f"{name}: made with {was}; `leash run {stage}` makes it with the present parameters")
    return dotted(json.loads((root / name).read_text(encoding="utf-8")))
