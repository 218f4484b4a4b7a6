"""Reads a YAML file as it is written, and replaces params.yaml without losing an edit that git does not have."""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE, parse, read_yaml

MARK = "# Written by `leash import --try`; unchanged while the rest of the file has the SHA-256 "


def replace_params(root: Path, file: Path) -> None:
    """Copy `file` over `root`/params.yaml, as `leash run --params FILE` does. Raises UserError where it is no valid
    file of parameters, and as `require_room`; then nothing is written."""
    from tasks.params.all import Params

    parse(Params, read_yaml(file), file=file)
    content, path = file.read_bytes(), root / PARAMS_FILE
    if path.exists() and path.read_bytes() == content:
        return  # a run that was stopped continues by the same command
    require_room(root, "--params")
    path.write_bytes(content)


def read_written(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file without what `read_yaml` adds to parameters. Raises UserError as that does."""
    read_yaml(path)
    content: dict[str, Any] = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    return content


def require_room(root: Path, option: str) -> None:
    """Raise UserError where `root`/params.yaml has changes that git does not have. A quick try is none, nor is a file
    of examples/."""
    path = root / PARAMS_FILE
    if path.exists() and not _is_stored(path.read_text(encoding="utf-8", errors="replace"), root):
        raise UserError(
            f"{path}: has changes that are not in git, and {option} writes this file; commit it or move it away, or "
            "drop the changes by `git checkout params.yaml`"
        )


def _is_stored(text: str, root: Path) -> bool:
    """Whether the parameter file can be had again: it is in git's HEAD, in examples/, or an unchanged quick try."""
    rest, mark, digest = text.rpartition(MARK)
    if mark and digest.strip() == digest_of(rest):
        return True
    if any(text == file.read_text(encoding="utf-8") for file in (root / "examples").glob("*.yaml")):
        return True
    done = subprocess.run(["git", "show", f"HEAD:./{PARAMS_FILE}"], cwd=root, capture_output=True, check=False)
    return done.returncode == 0 and done.stdout.decode("utf-8", "replace") == text


def digest_of(text: str) -> str:
    """The first digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
