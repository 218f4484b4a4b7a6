"""Checks that the libraries that can change a result have the versions in `tasks/stage/versions.json`. The file is a
dependency of every training stage, so that an upgrade makes them stale."""

import importlib.metadata
import json
from contextlib import suppress
from pathlib import Path

from rlhf_core.errors import UserError

VERSIONS_FILE = Path(__file__).with_name("versions.json")


def declared() -> dict[str, str]:
    """Library → version."""
    versions: dict[str, str] = json.loads(VERSIONS_FILE.read_text(encoding="utf-8"))
    return versions


def require_declared_versions() -> None:
    """Raise UserError when an installed version differs from the declared one (a local part as `+cpu` is ignored)."""
    wrong = []
    for name, right in declared().items():
        found = "(none)"
        with suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name).split("+")[0]
        if found != right:
            wrong.append(f"{name} {found} is installed, {right} is declared")
    if wrong:
        raise UserError(f"tasks/stage/versions.json: {'; '.join(wrong)}; run `make setup`, or declare the new version")
