"""`leash verify`: runs stages again in a git worktree with an empty DVC cache, and compares the hash of every output
with `dvc.lock`. Nothing in the workspace is changed."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from flows import processes, workspace
from flows.graph import brief, opened, read_graph
from flows.stages import Environment, StageCrash, StageUserError, run_stage
from flows.text import table
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from rlhf_core.files import remove
from tasks.records.differences import READERS, difference
from tasks.stage import provenance, rounds
from tasks.stage.definition import git_state
from tasks.stage.dvc_files import Project, open_project
from tasks.tracking.settings import HOLD_VARIABLE

Log = Callable[[str, str], None]
"""Receives the name of a stage and a line about it."""
DIGITS = 8
HEADROOM = 200 * 2**20
"""Bytes for code, logs and the records for MLflow."""
COPIES = 3
"""Copies of each output: in the clone, in its cache, and partial or as a checkpoint."""


@dataclass(frozen=True)
class Finding:
    """One output: its hash in `dvc.lock` and in the clone, and the verdict; `inputs` are those that differ, too."""

    stage: str
    out: str
    recorded: str
    rebuilt: str | None
    verdict: Literal["same", "DIFFERS", "differs", "not rebuilt"]
    inputs: tuple[str, ...] = ()
    exempt: tuple[str, ...] = ()
    """Why the recorded run was exempt from byte identity."""
    size: str = ""
    """How large the difference of a JSON or CSV file is; empty where it is not known."""

    @property
    def words(self) -> str:
        """The verdict and its reasons, for the table."""
        why = f" because its input {', '.join(self.inputs)} differs" if self.inputs else ""
        why += f": {self.size}" if self.size else ""
        why += f" (the recorded run was exempt: {'; '.join(self.exempt)})" if self.exempt else ""
        return f"{self.verdict}{why}"


@dataclass
class Report:
    """The findings of a verification, and the machine and code it ran with."""

    findings: list[Finding] = field(default_factory=list)
    failure: str = ""
    """Why a stage could not be rebuilt; empty where all could."""
    users_fault: bool = False
    cpu: str = ""
    threads: int | None = None
    commit: str | None = None
    dirty: bool = False
    kept: str = ""

    @property
    def origins(self) -> list[str]:
        """The stages with equal inputs and different outputs."""
        return list(dict.fromkeys(finding.stage for finding in self.findings if finding.verdict == "DIFFERS"))

    @property
    def exit_code(self) -> int:
        """0 same, 1 differs or failed, 2 a user's error."""
        if self.users_fault:
            return 2
        return 0 if not self.failure and all(finding.verdict == "same" for finding in self.findings) else 1

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "origins": self.origins, "same": self.exit_code == 0}


def verify(root: Path, names: Sequence[str], keep: bool, log: Log) -> Report:
    """Rebuild these stages (none: all) and compare; after a stage that fails the rest is not rebuilt.

    Raises UserError when dvc.lock is missing or not that of the current code, an input is lost, or the disk is too
    full. The clone is removed at the end, also after an error, unless `keep`.
    """
    import torch

    from tasks.params.loader import PARAMS_FILE, read_threads

    graph = read_graph(root)
    graph.select(names)
    chosen = [name for name in graph.stages if not names or name in names]
    commit, dirty = git_state(root)
    report = Report(cpu=str(torch.backends.cpu.get_cpu_capability()), threads=read_threads(root / PARAMS_FILE),
                    commit=commit, dirty=dirty)  # fmt: skip
    space = Workspace(root, f"verify-{os.getpid()}", workspace.resolve(root, "HEAD"))
    with open_project(root) as project:
        _require_room(project, chosen)
    with processes.session(), open_project(root) as project, _clone(space, keep):
        outs = {name: project.stage(name).outs for name in chosen}
        try:
            _fill(space, project, chosen)
            with opened(root) as here, opened(space.root) as there:
                for name in chosen:
                    why = [one for source in graph.sources[name] for one in here.reasons(source, allow_missing=True)]
                    if why := why + there.reasons(name, allow_missing=True):
                        raise UserError(
                            f"dvc.lock is not that of {name} as it is now ({brief(why)}); run `dvc repro`, and add new "
                            "files to git or DVC"
                        )
            tree = (commit or "no commit")[:DIGITS] + (" with uncommitted changes" if dirty else "")
            log("", f"rebuilding {', '.join(chosen)} from nothing, in a clone of {tree}")
            for name in chosen:
                log(name, "begins")
                options, variables = ("--no-run-cache",), environment(space.root)
                seconds = run_stage(space.root, name, False, None, partial(log, name), options, variables).seconds
                found = compare_outs(project, space.root, name)
                report.findings += found
                same = all(finding.verdict == "same" for finding in found)
                log(name, f"rebuilt in {seconds:.0f} s: {'the same bytes' if same else 'DIFFERS'}")
        except (StageUserError, StageCrash) as error:
            report.failure, report.users_fault = str(error), isinstance(error, StageUserError)
    report.kept = str(space.root) if keep else ""
    done = {finding.stage for finding in report.findings}
    report.findings += [Finding(name, out.path, out.recorded or "", None, "not rebuilt")
                        for name in chosen if name not in done for out in outs[name]]  # fmt: skip
    return report


def verify_round(root: Path, number: int, log: Log) -> Report:
    """Rebuild policy and pairs of a closed round as `verify`, with code, parameters and inputs of its commit, and
    compare them with rounds/N.

    Raises UserError as `verify`, for a round that is not closed, and where the commit or the rounds before it are not
    here. The workspaces are removed at the end, also after an error.
    """
    note = rounds.read_note(root, number)
    space = Workspace(root, f"round-{number}-{os.getpid()}", workspace.resolve(root, note["commit"]))
    log("", f"round {number} was made from commit {space.commit[:DIGITS]}")
    with _clone(space):
        report = verify(space.root, read_graph(space.root).select(["select"]).stages, False, log)
    rebuilt = {finding.out: finding for finding in report.findings}
    with open_project(root) as project:
        for out, name in ((rounds.MODEL, rounds.POLICY), (rounds.PREFERENCES, rounds.PAIRS)):
            path, now = rounds.path_in(number, name), rebuilt[out]
            kept = project.hash_at(root / path) or ""
            other = replace(now, out=path, recorded=kept, inputs=(), exempt=(), size="")
            if now.rebuilt is not None:
                other = replace(other, verdict="same" if now.rebuilt == kept else "DIFFERS")
            report.findings.append(other)
    return report


def environment(clone: Path) -> Environment:
    """Variables with which a stage runs the code of the clone, and sends nothing to MLflow."""
    database = f"sqlite:///{clone / 'mlflow.db'}"
    return {**workspace.environment(clone), "MLFLOW_TRACKING_URI": database, HOLD_VARIABLE: "1"}


@contextmanager
def _clone(space: Workspace, keep: bool = False) -> Iterator[None]:
    """The workspace at its commit, without raw data. It is removed at the end, also where it could not be made; with
    `keep` it stays once it is made."""
    made = False
    try:
        with workspace.opened(space, raw_data=False):
            made = True
            yield
    finally:
        if keep and made:
            workspace.write_note(space, why_kept="by `leash verify --keep`")
        else:
            workspace.remove(space)


def _require_room(project: Project, stages: Sequence[str]) -> None:
    """Raises UserError where the disk is too full for the inputs and outputs of these stages."""
    made = {out.path: out.size for name in stages for out in project.stage(name).outs}
    read = {file.path: file.size for name in stages for file in project.stage(name).inputs if file.path not in made}
    needed = HEADROOM + COPIES * sum(made.values()) + sum(read.values())
    free = shutil.disk_usage(project.root).free
    if free < needed:
        raise UserError(
            f"{project.root}: {needed / 2**30:.1f} GiB are needed for a clone and {free / 2**30:.1f} GiB are free; "
            "`leash gc --work` and `leash gc` free some"
        )


def _fill(space: Workspace, project: Project, stages: Sequence[str]) -> None:
    """Bring the workspace from its commit to the state of the checkout: edited files, and the inputs that dvc.lock
    records, from DVC's cache or remote. Remove the outputs of the stages, and give it an empty cache of its own. Raises
    UserError where neither has an input."""
    from tasks.stage.dvc_adapter import configure_workspace, stored_files

    again = [out for stage in project.stages if stage.name in stages for out in stage.outs]
    others = [out for stage in project.stages if stage.name not in stages for out in stage.outs]
    edited = workspace.git(space.home, "diff", "--name-only", "--relative", "-z", "HEAD").split("\0")
    for name in (*filter(None, edited), *(out.path for out in others if not out.in_cache)):
        remove(space.root / name)
        if (space.home / name).is_file():
            (space.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(space.home / name, space.root / name)
    read = [file.path for name in stages for file in project.stage(name).inputs]
    read += [path for name in stages for path in project.stage(name).params_of]
    for file in (*(out for out in others if out.in_cache), *project.tracked):
        if not any(f"{path}/".startswith(f"{file.path}/") or file.path.startswith(f"{path}/") for path in read):
            continue
        try:
            found = stored_files(space.home, file.recorded or "")
        except UserError as error:
            raise UserError(f"{file.path}: {error}; `dvc repro` makes what dvc.lock records") from None
        for name, stored in found.items():  # "" for a file
            (space.root / file.path / name).parent.mkdir(parents=True, exist_ok=True)
            stored.copy(space.root / file.path / name)
    for out in again:
        remove(space.root / out.path)
    configure_workspace(space.home, space.root, space.folder / "site", space.folder / "cache")


def compare_outs(project: Project, clone: Path, name: str) -> list[Finding]:
    """Each output of a stage in the clone against the project's dvc.lock."""
    from tasks.stage.models import NOT_DETERMINISTIC

    stage = project.stage(name)
    with open_project(clone) as copied:
        again = copied.stage(name)
    now = {file.path: file.recorded for file in (*again.inputs, *again.outs)}
    inputs = tuple(file.path for file in stage.inputs if now.get(file.path) != file.recorded)
    exempt = [] if stage.recorded_params.get("deterministic", True) else [NOT_DETERMINISTIC]
    for out in stage.outs:
        exempt += (provenance.read(out.place) or {}).get("exemptions", [])
    findings = []
    for out in stage.outs:
        recorded, rebuilt = out.recorded or "", now.get(out.path)
        if recorded == rebuilt:
            findings.append(Finding(name, out.path, recorded, rebuilt, "same"))
            continue
        kept = out.place if project.hash_at(out.place) == recorded else project.blob(recorded)
        suffix, size = Path(out.path).suffix, ""
        if suffix in READERS and kept.is_file() and (clone / out.path).is_file():
            size = difference(suffix, kept.read_text(), (clone / out.path).read_text())
        findings.append(Finding(name, out.path, recorded, rebuilt, "differs" if inputs else "DIFFERS", inputs,
                                tuple(dict.fromkeys(exempt)), size))  # fmt: skip
    return findings


def render(report: Report) -> str:
    """The table, and one line that sums it up."""
    rows = [
        (one.stage, one.out, one.recorded[:DIGITS], (one.rebuilt or "-")[:DIGITS], one.words) for one in report.findings
    ]
    lines = [table([("stage", "out", "recorded", "rebuilt", "verdict"), *rows]), ""]
    machine = f"CPU capability {report.cpu}" + (f", {report.threads} threads" if report.threads else "")
    different = [finding for finding in report.findings if finding.verdict != "same"]
    if report.failure:
        lines.append(f"not verified: {report.failure} ({machine})")
    elif different:
        lines.append(
            f"DIFFERS: {len(different)} of {len(report.findings)} outs; first in {', '.join(report.origins)} "
            f"({machine}; another type of CPU may give other last bits)"
        )
    else:
        stages = len({finding.stage for finding in report.findings})
        lines.append(f"same: all {len(report.findings)} outs of {stages} stages have the recorded bytes ({machine})")
    if report.kept:
        lines.append(f"the clone is kept: {report.kept} (`leash gc --work` removes it)")
    return "\n".join(lines)
