"""`leash gc`: what DVC's cache holds for which run; `dvc exp remove` and `dvc gc` remove old runs."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.filesize import decimal

from flows import driver, workspace
from flows.isolated import NIGHTLY, STUDY, trailer_of
from flows.text import table
from rlhf_core.errors import UserError
from rlhf_core.locks import FileLock, holder, is_held
from tasks.tracking import settings
from tasks.tracking.registry import BEFORE, CHALLENGER, CHAMPION, Registry

EXPERIMENT = re.compile(r"refs/exps/[0-9a-f]{2}/[0-9a-f]{38,62}/(?P<name>.+)")
ALIASES = (CHAMPION, CHALLENGER, settings.POLICY_ALIAS)
"""Versions of the registered policy that stay, and the champion's predecessor, which `leash promote --undo` needs."""
LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Run:
    """What needs objects of the cache."""

    name: str
    date: str
    objects: frozenset[str]
    ref: str = ""
    """Of an experiment."""
    goes: bool = False


@dataclass(frozen=True)
class Plan:
    """What is in the cache, and what goes."""

    runs: list[Run]
    sizes: dict[str, int]
    """Object -> bytes."""
    extra: frozenset[str]
    """Objects that stay, and that `dvc gc` would remove."""

    @property
    def removed(self) -> set[str]:
        """The objects that go: those of no run that stays."""
        return self.sizes.keys() - frozenset().union(*(run.objects for run in self.runs if not run.goes))

    def size(self, objects: Iterator[str] | set[str] | frozenset[str]) -> int:
        """Bytes of those that are in the cache."""
        return sum(self.sizes.get(one, 0) for one in objects)


def gc(root: Path, keep: int, studies: Sequence[str], yes: bool) -> None:
    """Print what the cache holds and what goes; remove it with `yes`.

    Raises UserError where a run works (with `yes`), the cache is shared with other projects, a study is unknown, MLflow
    does not answer or has nothing of the nightly runs that go, or DVC fails.
    """
    if not yes:
        plan = examine(root, keep, studies)
        print(render(plan))
        print("nothing was removed; `leash gc --yes` removes what is marked" if plan.removed else "nothing to remove")
        return
    with alone(root):
        plan = examine(root, keep, studies)
        print(render(plan), flush=True)
        if any(run.goes for run in plan.runs) and not Registry(root).exists:
            raise UserError(
                f"{settings.tracking_uri(root)} does not exist, so the champion is unknown; set MLFLOW_TRACKING_URI to "
                "where the runs were tracked"
            )
        print(remove(root, plan))


def examine(root: Path, keep: int, studies: Sequence[str]) -> Plan:
    """What stays: the checkout, other worktrees, heads of branches and tags, the champion, and all experiments but
    nightly ones older than the last `keep` and those of `studies`. Raises UserError as `gc`."""
    from tasks.stage.dvc_adapter import cache_objects, needed_objects
    from tasks.stage.dvc_files import cache_folder

    folder, sizes = cache_folder(root), cache_objects(root)
    if not folder.is_relative_to(root.resolve()):
        raise UserError(
            f"DVC's cache {folder} is outside of this project; other projects may need it: `dvc gc --projects`"
        )
    heads = [(ref.removeprefix("refs/").replace("heads/", "branch ").replace("tags/", "tag "), *rest)
             for ref, *rest in _refs(root, "refs/heads", "refs/tags")]  # fmt: skip
    experiments = _refs(root, "refs/exps")
    tagged = {commit for name, _, commit in heads if name.startswith("tag ")}
    goes = _old(root, experiments, keep, studies)
    needed = needed_objects(root, [commit for _, _, commit in (*heads, *experiments)])
    whole = {name: one.all for name, one in needed.items()}
    runs = [Run("this checkout", "", whole["workspace"])]
    runs += [Run(name, date, whole.get(commit, frozenset())) for name, date, commit in heads]
    for path in _worktrees(root):
        if cache_folder(path) == folder:
            runs.append(Run(f"worktree {os.path.relpath(path, root)}", "", needed_objects(path)["workspace"].all))
    runs += [Run(name, "", objects) for name, objects in champions(root)]
    for ref, date, commit in experiments:
        gone = ref in goes and commit not in tagged
        runs.append(Run(ref.rpartition("/")[2], date, whole.get(commit, frozenset()), ref, gone))
    known = {"workspace", *(commit for _, _, commit in heads), *(c for r, _, c in experiments if r not in goes)}
    by_dvc = frozenset().union(*(needed[one].cached for one in known & needed.keys()))
    stays = frozenset().union(*(run.objects for run in runs if not run.goes))
    return Plan(runs, sizes, (stays - by_dvc) & sizes.keys())


def _refs(root: Path, *patterns: str) -> list[tuple[str, str, str]]:
    """(name, date, commit), the newest first; of experiments only those that are complete."""
    words = "--format=%(refname)%00%(committerdate:short)%00%(objectname)%00%(*objectname)"
    lines = workspace.git(root, "for-each-ref", "--sort=-committerdate", words, *patterns).splitlines()
    found = [line.split("\0") for line in lines]
    return [(ref, date, peeled or commit) for ref, date, commit, peeled in found
            if not ref.startswith("refs/exps/") or EXPERIMENT.fullmatch(ref)]  # fmt: skip


def _old(root: Path, experiments: Sequence[tuple[str, str, str]], keep: int, studies: Sequence[str]) -> set[str]:
    """The experiments that go: nightly ones but the last `keep`, and those of the studies."""
    texts = workspace.git(root, "for-each-ref", "--format=%(refname)%00%(contents)%01", "refs/exps").split("\1")
    message = dict(text.strip().split("\0", 1) for text in texts if text.strip())
    of_study = {ref: trailer_of(message[ref], STUDY) for ref, _, _ in experiments}
    begun = {path.name for path in (root / "work" / "studies").glob("*/")}
    known = sorted(begun.union(study for study in of_study.values() if study))
    if unknown := set(studies) - set(known):
        raise UserError(
            f"--studies {', '.join(sorted(unknown))}: there are experiments of {', '.join(known) or 'none'}"
        )
    nightly = [ref for ref, _, _ in experiments if trailer_of(message[ref], NIGHTLY)]
    return {*nightly[keep:], *(ref for ref, study in of_study.items() if study in studies)}


def _worktrees(root: Path) -> list[Path]:
    """The other worktrees of the repository in which there is a DVC project: isolated workspaces, too."""
    lines = workspace.git(root, "worktree", "list", "--porcelain").splitlines()
    paths = [Path(line.removeprefix("worktree ")) for line in lines if line.startswith("worktree ")]
    return [path for path in paths if path != root.resolve() and (path / "dvc.yaml").is_file()]


def champions(root: Path) -> list[tuple[str, frozenset[str]]]:
    """(name, objects) of the registered policies with an alias of `ALIASES`. Raises UserError when MLflow fails."""
    from tasks.stage.dvc_files import open_project

    registry = Registry(root)
    versions = [(registry.by_alias(alias), alias) for alias in ALIASES]
    versions += [(registry.by_number(one.tags[BEFORE]), "champion before") for one, alias in versions
                 if one is not None and alias == CHAMPION and one.tags.get(BEFORE, "none") != "none"]  # fmt: skip
    names: dict[str, list[str]] = {}
    for one, what in versions:
        if one is not None:
            names.setdefault(one.number, []).append(what)
    digests = {one.number: one.digest for one, _ in versions if one is not None}
    with open_project(root) as project:
        return [
            (
                f"{registry.name} version {number} ({', '.join(names[number])})",
                frozenset({digest, *(path.parent.name + path.name for _, path in project.cached(digest))}),
            )
            for number, digest in digests.items()
        ]


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Within the block no run begins. Raises UserError where one works."""
    with driver.exclusive(root) as project:
        lock = FileLock(root / workspace.GC)
        if not lock.acquire(LOCK_SECONDS):
            raise UserError(f"another leash gc works here (process {holder(root / workspace.GC) or '?'})")
        try:
            for folder, pid in workspace.found(root):
                if pid is not None and folder.name != workspace.SERVE:
                    raise UserError(f"process {pid or '?'} works in {folder.relative_to(root)}; wait for its end")
            stages = [f"{stage}.lock" for stage in project.graph.stages]
            places = (root, *(root / ".dvc" / "tmp" / "exps").glob("*/"))
            if held := next((path for one in places for name in stages if is_held(path := one / "work" / name)), None):
                raise UserError(f"process {holder(held) or '?'} runs a stage ({held}); wait for its end")
            yield
        finally:
            lock.release()


def remove(root: Path, plan: Plan) -> str:
    """Remove the experiments that go, then the objects that nothing needs; returns a line about it. Raises UserError
    with DVC's error."""
    from tasks.stage.dvc_adapter import cache_objects, make_holder

    goes = [run.ref for run in plan.runs if run.goes]
    if goes:
        _dvc(root, "exp", "remove", *goes)
    with TemporaryDirectory(prefix="leash-") as name:
        holding = Path(name).resolve()
        workspace.git(holding, "init", "--quiet")
        make_holder(root, holding, sorted(plan.extra))
        _dvc(root, "gc", "--all-branches", "--all-tags", "--all-experiments", "--force", "--projects", str(holding))
    left = cache_objects(root)
    freed = sum(plan.sizes.values()) - sum(left.values())
    return f"removed {len(goes)} experiments and {len(plan.sizes) - len(left)} objects, {decimal(freed)}"


def _dvc(root: Path, *words: str) -> None:
    command = [sys.executable, "-m", "dvc", "--wait-for-lock", *words]
    changed = {**os.environ, **workspace.environment(root)}
    env = {name: value for name, value in changed.items() if value is not None}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise UserError(f"`dvc {words[0]}` failed: {errors[0] if errors else f'it ended with {done.returncode}'}")


def render(plan: Plan) -> str:
    """The table of what holds objects, then what goes."""
    count = Counter(one for run in plan.runs for one in run.objects)
    rows = []
    for run in plan.runs:
        own = {one for one in run.objects if count[one] == 1}
        sizes = (decimal(plan.size(own)), decimal(plan.size(run.objects)))
        rows.append((run.name, run.date, *sizes, "goes" if run.goes else ""))
    loose = plan.sizes.keys() - count.keys()
    size = decimal(plan.size(loose))
    rows.append(("results in no commit or experiment", "", size, size, "goes" if loose else ""))
    total = f"DVC's cache holds {decimal(sum(plan.sizes.values()))}; {decimal(plan.size(plan.removed))} of it go"
    return table([("run", "date", "it alone", "total", ""), *rows]) + f"\n{total}"
