"""`leash gc`: what DVC's cache holds for which run, and the removal of old runs."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from flows import driver, workspace
from flows.isolated import NIGHTLY, STUDY, trailer_of
from flows.text import table
from rlhf_core.errors import UserError
from rlhf_core.locks import held, holder, is_held
from tasks.stage.dvc_files import cache_folder, locked, open_project
from tasks.tracking import settings
from tasks.tracking.registry import BEFORE, CHALLENGER, CHAMPION, Registry

EXPERIMENTS = "refs/exps/[0-9a-f][0-9a-f]/*/*"
"""Of those that are complete: DVC has other references below refs/exps."""
ALIASES = (CHAMPION, CHALLENGER, settings.POLICY_ALIAS)
"""Versions of the registered policy that stay, and the champion's predecessor, which `leash promote --undo` needs."""
LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Run:
    """What needs objects of the cache."""

    name: str
    date: str
    objects: set[str]
    ref: str = ""
    """Of an experiment."""
    goes: bool = False


def gc(root: Path, keep: int, studies: Sequence[str], yes: bool) -> None:
    """Print what the cache holds and what goes; remove it with `yes`.

    Raises UserError where a run works (with `yes`), the cache is shared with other projects, a study is unknown, MLflow
    does not answer or has nothing of the nightly runs that go, or DVC fails.
    """
    from tasks.stage.dvc_adapter import cache_objects

    with alone(root) if yes else nullcontext():
        sizes = cache_objects(root)  # first: what comes meanwhile stays
        runs = examine(root, keep, studies)
        gone = sizes.keys() - set().union(*(run.objects for run in runs if not run.goes))
        print(render(runs, sizes, gone), flush=True)
        if not yes:
            print("nothing was removed; `leash gc --yes` removes what is marked" if gone else "nothing to remove")
            return
        experiments = [run.ref for run in runs if run.goes]
        if experiments and not Registry(root).exists:
            raise UserError(
                f"{settings.tracking_uri(root)} does not exist, so the champion is unknown; set MLFLOW_TRACKING_URI to "
                "where the runs were tracked"
            )
        if experiments:
            command = [sys.executable, "-m", "dvc", "--wait-for-lock", "exp", "remove", *experiments]
            env = workspace.process_environment(root)
            done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UserError(f"`dvc exp remove` failed: {' '.join(done.stderr.split()).removeprefix('ERROR: ')}")
        for run in examine(root, keep, []):  # an import, a commit or `dvc exp apply` may need some by now
            gone -= run.objects
        with locked(root, writes=True):
            for one in gone:
                (cache_folder(root) / one[:2] / one[2:]).unlink(missing_ok=True)
        freed = decimal(sum(sizes[one] for one in gone))
        print(f"removed {len(experiments)} experiments and {len(gone)} objects, {freed}")


def examine(root: Path, keep: int, studies: Sequence[str]) -> list[Run]:
    """What needs objects. All stays but nightly experiments older than the last `keep`, and those of `studies`; one
    with a tag stays, too. Raises UserError as `gc`."""
    from tasks.stage.dvc_adapter import needed_objects

    folder = cache_folder(root)
    if not folder.is_relative_to(root.resolve()):
        raise UserError(
            f"DVC's cache {folder} is outside of this project; other projects may need it: `dvc gc --projects`"
        )
    heads, experiments = _refs(root, "refs/heads", "refs/tags"), _refs(root, EXPERIMENTS)
    nightly = [ref for ref, _, _, message in experiments if trailer_of(message, NIGHTLY)]
    of_study = {ref: study for ref, _, _, message in experiments if (study := trailer_of(message, STUDY))}
    known = sorted({*(path.name for path in (root / "work" / "studies").glob("*/")), *of_study.values()})
    if unknown := sorted(set(studies).difference(known)):
        raise UserError(f"--studies {', '.join(unknown)}: there are experiments of {', '.join(known) or 'none'}")
    old = {*nightly[keep:], *(ref for ref, study in of_study.items() if study in studies)}

    needed = needed_objects(root, [commit for _, _, commit, _ in (*heads, *experiments)])
    runs = [Run("this checkout", "", needed["workspace"])]
    for ref, date, commit, _ in heads:
        name = ref.replace("refs/heads/", "branch ").replace("refs/tags/", "tag ")
        runs.append(Run(name, date, needed.get(commit, set())))
    for line in workspace.git(root, "worktree", "list", "--porcelain").splitlines():  # isolated workspaces, too
        path = Path(line.removeprefix("worktree "))
        is_other = line.startswith("worktree ") and path != root.resolve() and (path / "dvc.yaml").is_file()
        if is_other and cache_folder(path) == folder:
            runs.append(Run(f"worktree {os.path.relpath(path, root)}", "", needed_objects(path)["workspace"]))
    if data := imported(root):
        runs.append(Run("imported data and rounds of all commits", "", data))
    runs += champions(root)
    tagged = {commit for ref, _, commit, _ in heads if ref.startswith("refs/tags/")}
    for ref, date, commit, _ in experiments:
        goes = ref in old and commit not in tagged
        runs.append(Run(Path(ref).name, date, needed.get(commit, set()), ref, goes))
    return runs


def _refs(root: Path, *patterns: str) -> list[tuple[str, str, str, str]]:
    """(name, date, commit, message) of the references that match, the newest first."""
    form = "%(refname)%00%(committerdate:short)%00%(objectname)%00%(*objectname)%00%(contents)%01"
    lines = workspace.git(root, "for-each-ref", "--sort=-committerdate", f"--format={form}", *patterns).split("\1\n")
    found = [line.split("\0") for line in lines if line]
    return [(name, date, peeled or commit, message) for name, date, commit, peeled, message in found]


def imported(root: Path) -> set[str]:
    """Objects of the data that any commit has below data/raw/ and rounds/: the cache may hold the only copy."""
    listed = workspace.git(
        root, "rev-list", "--all", "--full-history", "--objects", "--", "data/raw", "rounds"
    ).splitlines()
    files = {blob for blob, _, path in (line.partition(" ") for line in listed) if path.endswith(".dvc")}
    text = "\n".join(workspace.git(root, "cat-file", "blob", blob) for blob in sorted(files))
    objects = set[str]()
    with open_project(root) as project:
        for digest in set(re.findall(r"md5: ([0-9a-f]{32}(?:\.dir)?)\b", text)):
            objects |= {digest, *(path.parent.name + path.name for _, path in project.cached(digest))}
    return objects


def champions(root: Path) -> list[Run]:
    """The registered policies with an alias of `ALIASES`, and the champion before. Raises UserError when MLflow
    fails."""
    registry, runs = Registry(root), []
    versions = registry.all()
    before = [one.tags.get(BEFORE) for one, aliases in versions if CHAMPION in aliases]
    with open_project(root) as project:
        for one, aliases in versions:
            names = [alias for alias in ALIASES if alias in aliases] + ["champion before"] * (one.number in before)
            if names:
                files = (path.parent.name + path.name for _, path in project.cached(one.digest))
                name = f"{registry.name} version {one.number} ({', '.join(names)})"
                runs.append(Run(name, "", {one.digest, *files}))
    return runs


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Within the block no run begins. Raises UserError where one works."""
    with driver.exclusive(root) as project, held(root / workspace.GC, LOCK_SECONDS, "runs leash gc here"):
        for folder, pid in workspace.found(root):
            if pid is not None and folder.name != workspace.SERVE:
                raise UserError(f"process {pid or '?'} works in {folder.relative_to(root)}; wait for its end")
        for place in (root, *(root / ".dvc" / "tmp" / "exps").glob("*/")):
            for lock in (place / "work" / f"{stage}.lock" for stage in project.graph.stages):
                if is_held(lock):
                    raise UserError(f"process {holder(lock) or '?'} runs a stage ({lock}); wait for its end")
        yield


def render(runs: Sequence[Run], sizes: dict[str, int], gone: Iterable[str]) -> str:
    """The table of what holds objects, then what goes."""

    def size(objects: Iterable[str]) -> str:
        return decimal(sum(sizes.get(one, 0) for one in objects))

    count = Counter(one for run in runs for one in run.objects)
    rows = [("run", "date", "it alone", "total", "")]
    for run in runs:
        alone_ = size(one for one in run.objects if count[one] == 1)
        rows.append((run.name, run.date, alone_, size(run.objects), "goes" if run.goes else ""))
    loose = sizes.keys() - count.keys()
    rows.append(("results of older commits, or of none", "", size(loose), size(loose), "goes" if loose else ""))
    return f"{table(rows)}\nDVC's cache holds {size(sizes)}; {size(gone)} of it is not needed"
