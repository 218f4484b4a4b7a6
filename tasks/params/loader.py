"""Reading `params.yaml` into strict models, with one clear line for the first mistake. What the keys mean stands in the
stage's own module. YAML 1.2, read as DVC reads it: PyYAML would take `1e-4` for text and `off` for false."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_core.errors import UserError

PARAMS_FILE = Path("params.yaml")


Model = TypeVar("Model", bound=BaseModel)


def read_yaml(path: Path = PARAMS_FILE) -> dict[str, Any]:
    """The file as plain dictionaries. Raises UserError when it is missing, is no YAML, or is no mapping."""
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: file not found; copy one of examples/*.yaml there") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8; save the file as UTF-8") from None
    except YAMLError as error:
        raise UserError(f"{path}: no valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping of blocks (ingest, base, sft, …)")
    return content


def parse(model: type[Model], content: Any, where: str = "", file: Path = PARAMS_FILE) -> Model:
    """`content` of `file` as `model`. Raises UserError naming every wrong key, its value and what is allowed."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(_describe(problem, where) for problem in error.errors())
        raise UserError(f"{file}: {problems}") from None


def _describe(problem: Any, where: str) -> str:
    key = ".".join([where, *(str(part) for part in problem["loc"])]).strip(".")
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown parameter; remove it or correct its name"
    if problem["type"] == "missing":
        return f"{key}: missing parameter; see docs/parameters.md"
    message = problem["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(problem["input"], dict) else f" (got {problem['input']!r})"
    return f"{key}: {message}{shown}" if key else message
