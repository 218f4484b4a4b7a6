"""Writes docs/parameters.md from the typed parameters; a test compares the page with the code.

python docs/make_parameters.py
"""

import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tasks.params.all import Params  # noqa: E402

HEADER = """# Parameters
All keys of `params.yaml`. [When to change an option of PPO](ppo-options.md). Complete files are in `examples/`.

An unknown key, a wrong type or a value out of range gives one line of error, before any work and before DVC changes an
output. This page is generated: `python docs/make_parameters.py`.
"""


def page() -> str:
    """The whole page."""
    blocks = [name for name, field in Params.model_fields.items() if _model_of(field.annotation)]
    contents = "Blocks: " + ", ".join(f"[{name}](#{name})" for name in blocks) + "."
    return "\n".join([HEADER, contents, "", *_block("", Params, {})]) + "\n"


def _block(prefix: str, model: type[BaseModel], known: dict[type[BaseModel], str], meaning: str = "") -> list[str]:
    """`known`: the heading under which the keys of a class are listed already."""
    title = prefix or "top level"
    about = " ".join(f"{meaning} {model.__doc__ or ''}".split())
    if model in known:
        first = known[model]
        same = f"Keys and defaults as in [{first}](#{first.replace('.', '')})."
        return [f"## {title}", " ".join(f"{meaning} {same}".split())]
    known[model] = title
    lines = [f"## {title}", about, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    inner: list[str] = []
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}".strip(".")
        block = _model_of(field.annotation)
        if block is not None:
            inner += ["", *_block(key, block, known, field.description or "")]
            continue
        lines.append(
            f"| `{key}` | {_type(field)} | {_default(field)} | {' '.join((field.description or '').split())} |"
        )
    return (lines if len(lines) > 5 else lines[:2]) + inner


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _type(field: FieldInfo) -> str:
    limits = []
    for rule in field.metadata:
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if (bound := getattr(rule, name, None)) is not None:
                limits.append(f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}")
    return " ".join([_name(field.annotation), ", ".join(limits)]).strip()


def _name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _name(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return " \\| ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if part is type(None) else _name(part) for part in typing.get_args(annotation))
    if origin is list:
        return f"list of {_name(typing.get_args(annotation)[0])}"
    if origin is dict:
        return "mapping"
    names = {int: "integer", float: "number", str: "text", bool: "true or false"}
    return names.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return f"`{json.dumps(default, ensure_ascii=False)}`".replace("|", "\\|")


if __name__ == "__main__":
    (HERE / "parameters.md").write_text(page(), encoding="utf-8")
