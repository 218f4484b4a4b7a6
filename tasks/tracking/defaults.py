"""The defaults of params.yaml by dotted names, for what shows or compares the parameters of a run. No stage imports it:
it would depend on the parameters of all."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from tasks.params.scorer import DEFAULT
from tasks.tracking.record import flatten

SINGLE = ("ingest.source", "preferences.source")
"""Parameters that other stages depend on without their block."""


def filled(params: Mapping[str, str]) -> dict[str, str]:
    """Dotted names and texts of the parameters of a run, as `flatten` writes them, with the defaults of what its file
    lacks. A block that may be absent (a method, `lora`) gets none where it is absent. Whole numbers are written
    alike."""
    known = {name: _plain(text) for name, text in params.items()}
    blocks = {name[:place] for name in known for place, letter in enumerate(f"{name}.") if letter == "."}
    return {name: text for name, (text, block) in _defaults().items() if block is None or block in blocks} | known


def filled_of_stage(stage: str, params: Mapping[str, str]) -> dict[str, str]:
    """The same for the parameters that one stage depends on: defaults of its own blocks only."""
    blocks = {name.partition(".")[0] for name in params if name not in SINGLE or name.startswith(f"{stage}.")}
    return {name: text for name, text in filled(params).items() if name in params or name.partition(".")[0] in blocks}


@cache
def _defaults() -> dict[str, tuple[str, str | None]]:
    """Name → (text of the default, the innermost optional block that has it)."""
    found = {}
    params = import_module("tasks.params.all").Params  # no stage depends on it for what MLflow shows
    for name, value, block in _walk(params, "", None):
        if name == "scorer":
            value = DEFAULT
        ((_, text),) = flatten({"value": value}).items()
        found[name] = (_plain(text), block)
    return found


def _walk(model: type[BaseModel], prefix: str, optional: str | None) -> Iterator[tuple[str, Any, str | None]]:
    for key, field in model.model_fields.items():
        name, required = f"{prefix}{key}", field.is_required()
        default = None if required else field.get_default(call_default_factory=True)
        kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else [field.annotation]
        inner = next((one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)), None)
        if inner is not None:
            may_be_absent = not required and (default is None or "enabled" in inner.model_fields)
            yield from _walk(inner, f"{name}.", name if may_be_absent else optional)
        elif not required:
            yield name, default, optional


def _plain(text: str) -> str:
    """The text of a number as people write it."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if not isinstance(value, float):
        return text
    return str(int(value)) if value.is_integer() else repr(value)
