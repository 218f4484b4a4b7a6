"""What `dvc.yaml` says about a stage, read through DVC: its inputs with their hashes, its outputs, and its key.

`dvc.yaml` is the only definition of the graph; nothing here repeats it.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dvc.dependency.param import ParamsDependency
from dvc.repo import Repo

from rlhf_core.errors import UserError
from tasks.params.loader import PARAMS_FILE
from tasks.stage.contents import content_hash
from tasks.tracking.tracker import PipelineIdentity

RAW = "data/raw"
CODE = ("tasks/", "rlhf_core/", "flows/")
"""Where code lies: what dvc.yaml names below these folders is code, everything else data or a model."""


@dataclass(frozen=True)
class Definition:
    """One stage of the graph, as DVC reads it."""

    name: str
    repo: Repo

    @cached_property
    def _stages(self) -> list[Any]:
        return executable(self.repo)

    @cached_property
    def _stage(self) -> Any:
        for stage in self._stages:
            if stage.name == self.name:
                return stage
        raise UserError(f"dvc.yaml: no stage named {self.name}")

    @property
    def place(self) -> tuple[int, int]:
        """(which stage, of how many), counted from 1."""
        return self._stages.index(self._stage) + 1, len(self._stages)

    @property
    def command(self) -> str:
        """The stage's command line."""
        return str(self._stage.cmd)

    @property
    def outs(self) -> list[str]:
        """Paths of the outputs, relative to the repository."""
        return [out.def_path for out in self._stage.outs]

    @property
    def inputs(self) -> list[str]:
        """Paths of the file and folder dependencies, relative to the repository."""
        return [dep.def_path for dep in self._stage.deps if not isinstance(dep, ParamsDependency)]

    def hashes(self) -> dict[str, str]:
        """The content hash of every input, as DVC knows it: it reads what has a new time, size or inode.

        Raises UserError for one that is missing.
        """
        result = {}
        for dep in self._stage.deps:
            if isinstance(dep, ParamsDependency):
                continue
            if not dep.exists:
                raise UserError(f"{dep.def_path}: file not found; `dvc repro {self.name}` makes what the stage needs")
            result[dep.def_path] = str(dep.get_hash().value)
        return result

    def require_sound(self, hashes: Mapping[str, str]) -> None:
        """Read every input. Raises UserError for one whose bytes are not those of its hash, though DVC takes it for
        unchanged: what is made from it would be recorded as made from the right ones."""
        for dep in self._stage.deps:
            if not isinstance(dep, ParamsDependency) and content_hash(dep) != hashes[dep.def_path]:
                raise UserError(
                    f"{dep.def_path}: other bytes than DVC has noted, in files that seem untouched (a disk or a cache "
                    f"that is damaged); `rm -r {dep.def_path}` and run again; `leash doctor` finds what else is damaged"
                )

    def tracked(self, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters that the stage depends on."""
        names = [name for dep in self._stage.deps if isinstance(dep, ParamsDependency) for name in dep.params]
        return {name: _lookup(params, name) for name in sorted(names)}

    def blocks(self, params: dict[str, Any]) -> dict[str, Any]:
        """The whole blocks of params.yaml of which the stage depends on at least one key."""
        names = sorted({name.partition(".")[0] for name in self.tracked(params)})
        return {name: params[name] for name in names}

    def key(self, params: dict[str, Any], hashes: dict[str, str]) -> str:
        """The identity of this execution: hash of command, tracked parameters and contents of the dependencies."""
        return digest({"cmd": self._stage.cmd, "params": self.tracked(params), "deps": hashes})

    def recorded_key(self) -> str | None:
        """The key of the execution that dvc.lock records and whose outputs DVC's cache holds; None where there is
        none."""
        params: dict[str, Any] = {}
        hashes: dict[str, str | None] = {}
        for dep in self._stage.deps:
            if isinstance(dep, ParamsDependency):
                params |= dep.hash_info.value or {}
            else:
                hashes[dep.def_path] = dep.hash_info.value
        if self._stage.cmd_changed or None in hashes.values() or not all(map(_is_cached, self._stage.outs)):
            return None
        return digest({"cmd": self._stage.cmd, "params": params, "deps": hashes})


def _is_cached(out: Any) -> bool:
    if not out.use_cache:
        return True
    return bool(out.hash_info) and Path(out.repo.cache.local.oid_to_path(out.hash_info.value)).exists()


def is_code(path: str) -> bool:
    """Whether a dependency is code rather than data or a model."""
    return path.startswith(CODE)


def executable(repo: Repo) -> list[Any]:
    """The stages of the graph that have a command, in the order of dvc.yaml. Each is known by its `name`: DVC's own
    address of a stage depends on the current folder."""
    return [stage for stage in repo.index.stages if stage.cmd]


def pipeline_identity(repo: Repo, params: dict[str, Any]) -> PipelineIdentity:
    """The identity of the pipeline run: raw data, parameters without `runtime`, and commands."""
    kept = {name: value for name, value in params.items() if name != "runtime"}
    commands = {stage.name: stage.cmd for stage in executable(repo)}
    key = digest({"raw": _raw_hash(repo), "params": kept, "commands": commands})
    commit, dirty = git_state(Path(repo.root_dir))
    return PipelineIdentity(key=key, params=kept, commit=commit, dirty=dirty)


def _raw_hash(repo: Repo) -> str | None:
    for stage in executable(repo):
        for dep in stage.deps:
            if dep.def_path == RAW and dep.exists:
                return str(dep.get_hash().value)
    return None


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
    """(commit, whether tracked files differ from it); (None, False) outside a git repository."""
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}

    def git(*words: str) -> str | None:
        result = subprocess.run(["git", *words], cwd=root, env=environment, capture_output=True, text=True, check=False)
        return result.stdout.strip() if result.returncode == 0 else None

    return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
