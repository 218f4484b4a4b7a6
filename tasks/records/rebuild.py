"""Prepares a rebuild in another workspace: checks `dvc.lock`, and copies the inputs of the stages by hash."""

import os
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import UserError
from tasks.records.recorded import Record, recorded, sizes
from tasks.stage.dvc_files import Definition, Project, open_project

HEADROOM = 200 * 2**20
"""Bytes for code, logs and the records for MLflow."""
COPIES = 3
"""Copies of each output: in the workspace, in the cache, and partial or as a checkpoint."""


@dataclass(frozen=True)
class Plan:
    """Stages to run again, in the order of the graph, and their inputs that none of them makes."""

    stages: tuple[str, ...]
    records: dict[str, Record]
    outside: dict[str, str]
    """Path → recorded hash of code, raw data and outputs of other stages, files of parameters among them."""
    sources: dict[str, str]
    """Path → hash in its .dvc file, for raw data that DVC tracks."""
    outs: frozenset[str]
    """All outputs of all stages; not copied to the clone."""
    bytes_needed: int


def plan(project: Project, stages: Sequence[str]) -> Plan:
    """Raises UserError if `dvc.lock` does not match the present code, parameters and data, or an input is missing."""
    records = recorded(project.root)
    wanted = [stage for stage in project.stages if stage.name in stages]
    made = {out.path for stage in wanted for out in stage.outs}
    outside: dict[str, str] = {}
    for stage in wanted:
        outside |= _check(project, stage, records, made)
    volume = sizes(project.root)
    return Plan(
        stages=tuple(stages),
        records=records,
        outside=outside,
        sources=_sources(project, outside),
        outs=frozenset(out.path for stage in project.stages for out in stage.outs),
        bytes_needed=HEADROOM
        + sum(volume.get(path, 0) for path in outside)
        + COPIES * sum(volume.get(out, 0) for out in made),
    )


def _check(project: Project, stage: Definition, records: dict[str, Record], made: set[str]) -> dict[str, str]:
    """The stage's outside inputs. Raises UserError with the stage and all that differs from `dvc.lock`."""
    name = stage.name
    record = records.get(name)
    if record is None:
        raise UserError(f"dvc.lock: {name} is not in it; run `dvc repro` first")
    files = {**record.inputs, **record.code}
    deps = [file.path for file in stage.inputs]
    changed = sorted(set(deps) ^ set(files))
    changed += ["its command"] if stage.command != record.command else []
    changed += stage.changed_params()
    changed += sorted({out.path for out in stage.outs} ^ set(record.outs))
    for path in set(deps) & set(files):
        maker = next((other for other in records.values() if path in other.outs), None)
        if maker is not None:
            changed += [path] if maker.outs[path] != files[path] else []
        elif path not in made and not _partly_missing(project, path):
            changed += [path] if project.hash_at(project.root / path) != files[path] else []
    if changed:
        raise UserError(f"dvc.lock is not that of {name} as it is now ({', '.join(changed)}); run `dvc repro` first")
    outs = {path: value for other in records.values() for path, value in other.outs.items()}
    files |= {path: outs[path] for path in stage.params_of if path in outs}
    return {path: value for path, value in files.items() if path not in made}


def _sources(project: Project, outside: Collection[str]) -> dict[str, str]:
    """Data that DVC tracks by a .dvc file and that are, or are below, one of these inputs."""
    return {
        file.path: file.recorded
        for file in project.tracked
        if file.recorded and any(file.path == name or file.path.startswith(f"{name}/") for name in outside)
    }


def _partly_missing(project: Project, path: str) -> bool:
    """Whether tracked raw data below `path` are missing in the workspace; DVC's cache may have them."""
    return any(not (project.root / source).exists() for source in _sources(project, [path]))


def fill(project: Project, clone: Path, what: Plan) -> None:
    """Copy the files that git tracks, in their present state, and all outside inputs to `clone`.

    Raises UserError if an input is neither in the workspace nor in DVC's cache, or a copy has another hash.
    """
    root = project.root
    for name in tracked_files(root):
        if not any(name == out or name.startswith(f"{out}/") for out in what.outs):
            _copy(root / name, clone / name)
    for path, digest in what.sources.items():
        _place(project, clone, path, digest)
    with open_project(clone) as twin:
        for path, digest in what.outside.items():
            if twin.hash_at(clone / path) != digest:
                _place(project, clone, path, digest)
                if twin.hash_at(clone / path) != digest:
                    raise UserError(f"{path}: not what dvc.lock records; run `dvc repro` first")


def tracked_files(root: Path) -> list[str]:
    """The files below `root` that git tracks and that exist. Raises UserError outside a git repository."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{root}: no git repository; `git init` and commit the project, so that it is known what it is")
    return [name for name in dict.fromkeys(done.stdout.split("\0")) if name and os.path.lexists(root / name)]


def _place(project: Project, clone: Path, path: str, digest: str) -> None:
    """Copy the content with this hash from the workspace or else DVC's cache."""
    place = project.root / path
    if project.hash_at(place) == digest:
        files = [(name, place / name if name else place) for name in project.files_below(place)]
    else:
        files = project.cached(digest)
        if not files or not all(blob.is_file() for _, blob in files):
            raise UserError(
                f"{path}: what dvc.lock records ({digest[:8]}) is neither in the workspace nor in DVC's cache; "
                "`dvc pull` or `dvc repro` brings it back"
            )
    for name, source in files:
        _copy(source, clone / path / name if name else clone / path)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        return  # a submodule
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target, follow_symlinks=source.is_file() and not source.is_symlink())
    if not target.is_symlink() and os.access(source, os.X_OK):
        target.chmod(0o755)
