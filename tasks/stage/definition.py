"""A stage as dvc.yaml defines it: its inputs with their hashes, its outputs, its tracked parameters and its key."""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE, with_derived
from tasks.stage.dvc_files import GraphStage, Project
from tasks.tracking.settings import RUN_VARIABLE

RAW = "data/raw"
ROUND = re.compile(r"rounds/\d+")
"""The path of a closed round."""
UNTRACKED = ("runtime", "promote")
"""Blocks of params.yaml that change no result."""
WRITTEN = re.compile(
    r"dvc\.lock|(metrics|plots)/.+|data/(check\.ok|check_data\.ok|methods\.json)|(.+/)?([^/]*\.)?provenance\.json"
)
"""Tracked files that a run itself writes, and that DVC deletes before a stage: they say nothing about its inputs."""
CODE = ("tasks/", "rlhf_core/", "flows/")
"""Dependencies in these folders are code, all others data or models."""


@dataclass(frozen=True)
class Definition:
    """One stage of the graph."""

    name: str
    project: Project

    @cached_property
    def _stage(self) -> GraphStage:
        return self.project.stage(self.name)

    @property
    def position(self) -> tuple[int, int]:
        """(which stage, of how many), counted from 1."""
        return self.project.stages.index(self._stage) + 1, len(self.project.stages)

    @property
    def command(self) -> str:
        """The stage's command line."""
        return self._stage.command

    @property
    def outs(self) -> list[str]:
        """Paths of the outputs, relative to the repository."""
        return [out.path for out in self._stage.outs]

    @property
    def inputs(self) -> list[str]:
        """Paths of the file and folder dependencies, relative to the repository."""
        return [file.path for file in self._stage.inputs]

    def hashes(self) -> dict[str, str]:
        """DVC's hash of every input. Raises UserError for a missing input."""
        for file in self._stage.inputs:
            if not file.exists:
                raise UserError(f"{file.path}: file not found; `dvc repro {self.name}` makes what the stage needs")
        return {file.path: file.known_hash() for file in self._stage.inputs}

    def require_intact(self, hashes: Mapping[str, str], recorded: bool) -> None:
        """Read every input. Raises UserError for one with other bytes than its hash although its time and size are
        unchanged, and where DVC will record the result (`recorded`) also for one with other bytes than its maker's
        entry in dvc.lock: DVC would record the result as made from the right bytes."""
        makers = self.project.makers() if recorded else {}
        for file in self._stage.inputs:
            made = makers[file.path][1].recorded if file.path in makers else None
            if file.content_hash() not in {hashes[file.path]} & {made or hashes[file.path]}:
                raise UserError(
                    f"{file.path}: other bytes than DVC has noted (an edit, or a damaged disk or cache); `rm -r "
                    f"{file.path}` and run again, or keep an edit by `dvc commit`; `leash doctor` finds what else is "
                    "damaged"
                )

    def tracked(self, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters that the stage depends on."""
        known = with_derived(params)
        return {name: _lookup(known, name) for name in sorted(self._stage.params)}

    def blocks(self, params: dict[str, Any]) -> dict[str, Any]:
        """The whole blocks of params.yaml of which the stage depends on at least one key."""
        names, known = sorted({name.partition(".")[0] for name in self.tracked(params)}), with_derived(params)
        return {name: known[name] for name in names}

    def key(self, params: dict[str, Any], hashes: dict[str, str]) -> str:
        """The identity of this execution: hash of command, tracked parameters and contents of the dependencies."""
        return digest({"cmd": self.command, "params": self.tracked(params), "deps": hashes})

    def recorded_key(self) -> str | None:
        """The key of the execution in dvc.lock, if DVC's cache holds its outputs; else None."""
        hashes = {file.path: file.recorded for file in self._stage.inputs}
        complete = None not in hashes.values() and all(out.is_cached for out in self._stage.outs)
        if self._stage.command_changed or not complete:
            return None
        return digest({"cmd": self.command, "params": dict(self._stage.recorded_params), "deps": hashes})


def is_code(path: str) -> bool:
    """Whether a dependency is code rather than data or a model."""
    return path.startswith(CODE)


def digest(content: Any) -> str:
    """SHA-256 over the canonical JSON of `content`."""
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _lookup(params: dict[str, Any], name: str) -> Any:
    value: Any = params
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(f"{PARAMS_FILE}: {name}: missing parameter; see docs/parameters.md")
        value = value[part]
    return value


def git_state(root: Path) -> tuple[str | None, bool]:
    """(commit, whether files that a run only reads differ from it); (None, False) outside a git repository. An isolated
    run counts as equal: only its overrides differ, and they are listed."""
    return git(root, "rev-parse", "HEAD"), RUN_VARIABLE not in os.environ and bool(edited_files(root))


def edited_files(root: Path) -> list[str]:
    """Tracked files of the project that differ from the commit, without those that a run writes."""
    names = (git(root, "diff", "--name-only", "--relative", "-z", "HEAD") or "").split("\0")
    return [name for name in names if name and not WRITTEN.fullmatch(name)]


def git(root: Path, *words: str) -> str | None:
    """What a git command prints; None where it fails."""
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    result = subprocess.run(["git", *words], cwd=root, env=environment, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None
