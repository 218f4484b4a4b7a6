"""Which inputs of a stage are code, and the state of git."""

import os
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlhf_core.errors import UserError
from tasks.tracking.settings import RUN_VARIABLE

RAW = "data/raw"
ROUND = re.compile(r"rounds/\d+")
"""The path of a closed round."""
UNTRACKED = ("runtime", "promote")
"""Blocks of params.yaml that change no result."""
WRITTEN = re.compile(
    r"dvc\.lock|metrics/summary\.json|data/(check\.ok|check_data\.ok|methods\.json)|(.+/)?([^/]*\.)?provenance\.json"
)
"""Tracked files that a run itself writes, and that DVC deletes before a stage: they say nothing about its inputs."""
CODE = ("tasks/", "rlhf_core/", "flows/")
"""Dependencies in these folders are code, all others data or models."""


def is_code(path: str) -> bool:
    """Whether a dependency is code rather than data or a model."""
    return path.startswith(CODE)


def git_state(root: Path) -> tuple[str | None, bool]:
    """(commit, whether files that a run only reads differ from it); (None, False) outside a git repository. An isolated
    run counts as equal: only its overrides differ, and they are listed."""
    return git(root, "rev-parse", "HEAD"), RUN_VARIABLE not in os.environ and bool(edited_files(root))


def edited_files(root: Path) -> list[str]:
    """Tracked files of the project that differ from the commit, without those that a run writes."""
    names = (git(root, "diff", "--name-only", "--relative", "-z", "HEAD") or "").split("\0")
    return [name for name in names if name and not WRITTEN.fullmatch(name)]


def require_untracked(root: Path, outs: Sequence[str]) -> None:
    """Raise UserError where git tracks one of these outputs, which belong to DVC's cache: DVC would refuse them when
    the stage has ended."""
    if outs and (tracked := (git(root, "ls-files", "--", *outs) or "").split("\n")[0]):
        place = next(out for out in outs if f"{tracked}/".startswith(f"{out}/"))
        raise UserError(
            f"git tracks {tracked}, which belongs to DVC's cache; `git rm -r --cached {place}`, `git commit`, run it "
            "again"
        )


def git(root: Path, *words: str) -> str | None:
    """What a git command prints; None where it fails, or where there is no git."""
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    with suppress(FileNotFoundError):
        result = subprocess.run(
            ["git", *words], cwd=root, env=environment, capture_output=True, encoding="utf-8", errors="replace",
            check=False,
        )  # fmt: skip
        return result.stdout.strip() if result.returncode == 0 else None
    return None
