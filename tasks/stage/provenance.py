"""What a model was made from, in `models/NAME.provenance.json` beside its folder: inside, it would change the hash of a
model whose weights are the same. As every out it is a function of the stage's inputs, without commit, time, host,
absolute path or secret."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError
from tasks.params.secrets import HIDDEN, is_secret
from tasks.stage.definition import is_code
from tasks.stage.dvc_files import Definition
from tasks.stage.outputs import Outputs
from tasks.stage.versions import declared
from tasks.tracking.settings import without_credentials

SUFFIX = ".provenance.json"
KEYS = ("stage", "command", "params", "inputs", "code", "versions", "exemptions")


def path_of(folder: Path) -> Path:
    """The file with the record of a model folder."""
    return folder.with_name(folder.name + SUFFIX)


def write(
    definition: Definition,
    content: Mapping[str, Any],
    hashes: Mapping[str, str],
    outputs: Outputs,
    exemptions: Sequence[str] = (),
) -> None:
    """Write the record of every model that the stage declares one for.

    `content` is params.yaml, `hashes` are DVC's of every dependency, `exemptions` say why the run is exempt from byte
    identity.
    """
    for out in (out for out in outputs.declared if out.endswith(SUFFIX)):
        outputs.path(out).write_text(render(describe(definition, content, hashes, exemptions)), encoding="utf-8")


def describe(
    definition: Definition, content: Mapping[str, Any], hashes: Mapping[str, str], exemptions: Sequence[str]
) -> dict[str, Any]:
    """The record: stage, command, tracked parameters, hashes of inputs and of code, versions of the libraries."""
    return {
        "stage": definition.name,
        "command": definition.command,
        "params": without_secrets(definition.tracked(dict(content))),
        "inputs": {path: value for path, value in hashes.items() if not is_code(path)},
        "code": {path: value for path, value in hashes.items() if is_code(path)},
        "versions": declared(),
        "exemptions": list(exemptions),
    }


def render(record: Mapping[str, Any]) -> str:
    """The file's text: sorted keys, indent 2; what JSON cannot hold (a date, an infinity) as text."""
    return json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def read(folder: Path) -> dict[str, Any] | None:
    """The record of a model folder; None where there is none. Raises UserError when the file is damaged."""
    path = path_of(folder)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); take the model from where it was made") from None
    if not isinstance(record, dict) or any(key not in record for key in KEYS):
        raise UserError(f"{path}: no provenance of Leash; it lacks one of {', '.join(KEYS)}")
    return record


def without_secrets(value: Any, name: str = "") -> Any:
    """The parameters without the values of secrets and the credentials in addresses. Infinities become text: JSON has
    none, and a finished training must not fail on them."""
    if isinstance(value, Mapping):
        return {str(key): without_secrets(part, f"{name}.{key}" if name else str(key)) for key, part in value.items()}
    if is_secret(name):
        return HIDDEN
    if isinstance(value, list):
        return [without_secrets(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return without_credentials(value) if isinstance(value, str) else value
