"""Isolated workspaces: a git worktree at a commit in `work/runs/NAME/tree`, with its own parameters, locks and state.

It shares the DVC cache of the checkout that it was made from, or has an empty one. A workspace that a killed process
has left is continued; `leash gc --work` lists those that are kept.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flows import processes
from flows.stages import Environment
from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from rlhf_core.locks import held, holder, is_held
from tasks.tracking.settings import without_credentials

RUNS = Path("work") / "runs"
TREE = "tree"
OWNER = "owner.lock"
"""Locked by the process that works in the workspace."""
GC = Path("work") / "gc.lock"
"""Held while objects are removed from DVC's cache; no workspace is opened meanwhile."""
GC_SECONDS = 600.0
SERVE = "serve"
"""The workspace of `leash serve`, which runs no stage."""
NOTE = "workspace.json"
"""Written when the workspace is complete: its commit, its overrides, and why it was kept."""
_OF_A_REPOSITORY = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_NAMESPACE", "GIT_SHALLOW_FILE",
    "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_QUARANTINE_PATH",
)  # fmt: skip
"""Variables that tie git to the repository of a hook; those with credentials and settings stay."""
WORKTREES = Path("work") / "worktrees.lock"
"""Held by `git worktree`, which fails where another one runs at the same moment."""
WORKTREE_SECONDS = 1800.0


@dataclass(frozen=True)
class Workspace:
    """One isolated workspace of the checkout at `home`."""

    home: Path
    name: str
    commit: str
    overrides: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """All that belongs to it."""
        return self.home / RUNS / self.name

    @property
    def root(self) -> Path:
        """The project in it."""
        return self.folder / TREE

    @property
    def note(self) -> dict[str, object]:
        """What identifies it: two workspaces with equal notes are the same."""
        return {"commit": self.commit, "overrides": list(self.overrides)}


@contextmanager
def opened(workspace: Workspace, pull: bool = False, raw_data: bool = True) -> Iterator[Workspace]:
    """Make the workspace, or continue in it, and hold its lock within the block. It stays until `remove`.

    With `pull` raw data that the cache lacks are fetched from DVC's remote (`dvc exp save` needs all of them); without
    `raw_data` it has none. Raises UserError when another process works in it, when the commit or the tracked raw data
    are missing, or for an override that does not fit params.yaml.
    """
    from tasks.stage.dvc_adapter import apply_overrides, configure_workspace

    home, root = workspace.home, workspace.root
    with held(workspace.folder / OWNER, 0.0, f"works in {workspace.folder}"):
        with held(home / GC, GC_SECONDS, "removes objects of DVC's cache"):
            pass
        if (root / "work").is_dir():  # the stages of a killed run stop by themselves
            with held(root / "work" / "driver.lock", processes.STOPPING_SECONDS, f"works in {root}"):
                pass
        known = {key: value for key, value in _read_note(workspace.folder).items() if key != "kept"}
        if known != workspace.note:
            _remove_tree(workspace)
            with held(home / WORKTREES, WORKTREE_SECONDS, "makes or removes a worktree"):
                git(home, "worktree", "add", "--quiet", "--detach", "--force", str(root), workspace.commit)
            configure_workspace(home, root, workspace.folder / "site", None)
            apply_overrides(root, workspace.overrides)
            if raw_data:
                _bring_raw_data(workspace, pull)
            write_note(workspace)
        yield workspace


def _bring_raw_data(workspace: Workspace, pull: bool) -> None:
    """Check out the data that DVC tracks by .dvc files, from the cache, or with `pull` also from its remote. Raises
    UserError where they are not there."""
    sources = git(workspace.root, "ls-files", "*.dvc").split()
    command = [sys.executable, "-m", "dvc", "pull" if pull else "checkout", "--quiet", *sources]
    env = process_environment(workspace.root)
    if not sources:
        return
    done = subprocess.run(command, cwd=workspace.root, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = without_credentials("".join(done.stderr.strip().splitlines()[-1:]))
        raise UserError(
            f"{', '.join(sources)}: DVC's cache does not hold these data as commit {workspace.commit[:8]} has them; "
            f"`dvc pull` or `leash import` brings them (DVC: {said})"
        )


def write_note(workspace: Workspace, why_kept: str = "") -> None:
    """Record that the workspace is complete, and why it stays."""
    content = workspace.note | ({"kept": why_kept} if why_kept else {})
    with atomic(workspace.folder / NOTE) as place:
        place.write_text(json.dumps(content) + "\n", encoding="utf-8")


def why_kept(folder: Path) -> str:
    """What `write_note` recorded; empty for a workspace whose process died."""
    return str(_read_note(folder).get("kept", ""))


def _read_note(folder: Path) -> dict[str, object]:
    try:
        return dict(json.loads((folder / NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def remove(workspace: Workspace) -> None:
    """Remove the workspace. One that is interrupted leaves a workspace that is made again when it is opened."""
    _remove_tree(workspace)
    shutil.rmtree(workspace.folder, ignore_errors=True)


def _remove_tree(workspace: Workspace) -> None:
    (workspace.folder / NOTE).unlink(missing_ok=True)
    for name in (TREE, "cache", "site"):
        shutil.rmtree(workspace.folder / name, ignore_errors=True)
    forget(workspace.home, workspace.root)


def forget(home: Path, tree: Path) -> None:
    """Remove git's entry of a worktree whose folder is gone. (`git worktree prune` removes also those on disks that are
    not mounted.)"""
    with suppress(UserError), held(home / WORKTREES, WORKTREE_SECONDS, "makes or removes a worktree"):
        git(home, "worktree", "remove", "--force", "--force", str(tree))


def found(home: Path) -> Iterator[tuple[Path, int | None]]:
    """(folder, the process that works in it) of each workspace: its maker, or a stage that a killed maker has left;
    None where nobody does."""
    for folder in sorted((home / RUNS).glob("*/")):
        locks = [folder / OWNER, *sorted((folder / TREE / "work").glob("*.lock"))]
        locked = next((lock for lock in locks if is_held(lock)), None)
        yield folder, (holder(locked) or 0) if locked else None


def environment(root: Path) -> Environment:
    """Variables with which a command runs the code of the workspace at `root` and uses its git repository, also when a
    git hook has started this process."""
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**dict.fromkeys(_OF_A_REPOSITORY), "PYTHONPATH": path, "PYTHONSAFEPATH": None}


def process_environment(root: Path, **more: str) -> dict[str, str]:
    """All variables of such a command, with `more`."""
    changed = {**os.environ, **environment(root), **more}
    return {name: value for name, value in changed.items() if value is not None}


def resolve(home: Path, revision: str) -> str:
    """The commit that a branch, tag or hash names now. Raises UserError."""
    try:
        return git(home, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except UserError:
        raise UserError(f"{home}: git knows no commit {revision!r}; commit the project, or name a branch") from None


def fetch(home: Path, branch: str) -> None:
    """Bring a remote's branch up to date; does nothing for a local one. Raises UserError when the remote fails."""
    remote, _, name = branch.partition("/")
    if name and remote in git(home, "remote").split():
        git(home, "check-ref-format", f"refs/heads/{name}")  # else git could take it for an option or a refspec
        git(home, "fetch", "--quiet", remote, f"+refs/heads/{name}:refs/remotes/{remote}/{name}")


def git(folder: Path, *words: str) -> str:
    """Run git, without hooks; its output. Raises UserError with its message."""
    command = ["git", "-c", "core.hooksPath=/dev/null", *words]
    here = {name: value for name, value in os.environ.items() if name not in _OF_A_REPOSITORY}
    env = {"GIT_TERMINAL_PROMPT": "0"} | here
    done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        error = " ".join(done.stderr.decode("utf-8", "replace").split()).removeprefix("fatal: ")
        raise UserError(f"git {words[0]} in {folder}: {error or f'it ended with {done.returncode}'}")
    return done.stdout.decode("utf-8", "replace")
