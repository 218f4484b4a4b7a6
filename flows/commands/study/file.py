"""Reads a study file: the call of `leash study`, written down. Its values become overrides in Hydra's grammar, so that
a trial of a file is a trial of the command line."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from flows.commands.study.trials import SEED, Call
from flows.params_file import read_written
from rlhf_core.config.block import Block, Count
from rlhf_core.errors import UserError
from tasks.params.loader import parse
from tasks.params.variant import merged

PLAIN = re.compile(r"(?!(null|true|false|nan|inf)$)[A-Za-z_][\w./-]*", re.IGNORECASE)
"""Text that Hydra reads as text without quotes."""


class _File(Block):
    name: str | None = None
    params: str | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    cases: dict[str, dict[str, Any]] = Field(default_factory=dict)
    seeds: list[Count] = Field(default_factory=list)
    methods: list[str] | None = None
    """None: those of the parameters; an empty list: PPO alone."""
    objective: str | None = None
    minimise: bool = False
    constraint: str | None = None


def read_study(root: Path, path: Path) -> tuple[str | None, Call]:
    """The name of the study and its call. `set` is key → value or list of values to try, `cases` name → key → value,
    `params` a parameter file, relative to the project at `root`.

    Raises UserError for an unknown key of the file, and for a parameter that it sets twice.
    """
    if not path.is_file():
        raise UserError(f"{path}: file not found; name a study file (docs/how-to/compare-runs.md has one)")
    study = parse(_File, read_written(path), file=path)
    if empty := [key for key, value in study.set.items() if value == []]:
        raise UserError(f"{path}: set.{empty[0]}: no value to try; name one (a parameter that is an empty list: [[]])")
    for name, case in (study.cases or {"": {}}).items():
        keys = [*study.set, *case, *([SEED] if study.seeds else [])]
        for place, key in enumerate(keys):
            for other in keys[:place]:
                if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                    both = key if key == other else f"{key} and {other}"
                    where = f"set, seeds or cases.{name}" if name else "set and seeds"
                    raise UserError(f"{path}: {where}: {both} would set one parameter twice; keep one of them")
        if SEED in case:
            raise UserError(f"{path}: cases.{name}.{SEED}: all cases have the same seeds; write them into `seeds`")
    try:
        words = []
        for key, value in study.set.items():
            values = value if isinstance(value, list) else [value]
            words.append(f"{key}={','.join(map(as_word, values))}")
        words += [f"{SEED}={','.join(map(str, study.seeds))}"] if study.seeds else []
        cases = {
            name: tuple(f"{key}={as_word(value)}" for key, value in case.items()) for name, case in study.cases.items()
        }
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    params = read_written(root / Path(study.params).expanduser()) if study.params else None
    methods = () if study.methods is None else tuple(study.methods) or ("ppo",)
    call = Call(tuple(words), methods, None, study.objective, study.constraint, not study.minimise, cases, params)
    return study.name, call


def changes(base: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[str, ...]:
    """Overrides that lay `params` over `base`, the content of params.yaml. With every required block `params` takes the
    place of `base`: what only `base` has is removed."""
    from tasks.params.all import Params

    complete = {name for name, field in Params.model_fields.items() if field.is_required()} <= params.keys()
    return tuple(_words(base, params if complete else merged(dict(base), dict(params))))


def _words(base: Mapping[str, Any], wanted: Mapping[str, Any], above: str = "") -> list[str]:
    words = []
    for key in (key for key in base if key not in wanted):
        words += [f"++{above}{key}=0"] if base[key] is None else []  # Hydra does not find a null that it is to remove
        words.append(f"~{above}{key}")
    for key, value in wanted.items():
        inner = base.get(key)
        if isinstance(value, dict) and isinstance(inner, dict) and value.keys() & inner.keys():
            words += _words(inner, value, f"{above}{key}.")
        elif key not in base or as_word(value) != as_word(inner):
            words += [f"~{above}{key}"] if isinstance(inner, dict) else []  # else Hydra merges both
            words.append(f"++{above}{key}={as_word(value)}")
    return words


def as_word(value: Any) -> str:
    """A value of YAML in Hydra's grammar. Raises UserError for what the grammar cannot express."""
    if isinstance(value, dict):
        if wrong := [key for key in value if not PLAIN.fullmatch(str(key))]:
            raise UserError(f"{wrong[0]!r} cannot be a key in an override; set it in params.yaml and commit it")
        return "{" + ",".join(f"{key}:{as_word(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_word, value)) + "]"
    if not isinstance(value, str) or PLAIN.fullmatch(value):
        return value if isinstance(value, str) else json.dumps(value, default=str)
    if "${" in value:
        raise UserError(f"{value!r}: ${{…}} would be replaced in an override; set it in params.yaml and commit it")
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + "\\" * bool(found[2]) + found[2], value) + "'"
