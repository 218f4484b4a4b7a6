"""`leash verify`: runs the stages again in a clone with an empty cache, and compares the hash of every output with
`dvc.lock`. Nothing in the workspace is changed."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from flows import processes, workspace
from flows.graph import read_graph
from flows.stages import Environment, StageCrash, StageUserError, run_stage
from flows.text import table
from flows.workspace import Workspace
from rlhf_core.errors import UserError
from tasks.tracking.settings import HOLD_VARIABLE

Log = Callable[[str, str], None]
Verdict = Literal["same", "DIFFERS", "differs", "not rebuilt"]
DIGITS = 8
OPTIONS = ("--no-run-cache",)


@dataclass(frozen=True)
class Finding:
    """One output: its hash in `dvc.lock` and in the clone, and the verdict; `inputs` are those that differ, too."""

    stage: str
    out: str
    recorded: str
    rebuilt: str | None
    verdict: Verdict
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
    """Rebuild these stages (none: all) and compare; `log(stage, line)` receives the live lines.

    Raises UserError when dvc.lock is missing or not that of the current code, an input is lost, or the disk is too
    full. The clone is removed at the end, also after an error, unless `keep`.
    """
    from tasks.records.rebuild import fill, plan
    from tasks.stage.definition import git_state
    from tasks.stage.dvc_files import open_project

    graph = read_graph(root)
    graph.select(names)
    stages = [name for name in graph.stages if not names or name in names]
    report = Report()
    report.commit, report.dirty = git_state(root)
    with processes.session(), open_project(root) as recorded_project:
        what = plan(recorded_project, stages)
        _require_room(root, what.bytes_needed)
        tree = (report.commit or "no commit")[:DIGITS] + (" with uncommitted changes" if report.dirty else "")
        log("", f"rebuilding {', '.join(what.stages)} from nothing, in a clone of {tree}")
        with _empty_workspace(root, keep) as project:
            report.kept = str(project) if keep else ""
            fill(recorded_project, project, what)
            _rebuild(root, project, what, report, log)
    report.cpu, report.threads = _machine(root)
    return report


def verify_round(root: Path, number: int, log: Log) -> Report:
    """Rebuild policy and pairs of a closed round as `verify`, with code, parameters and inputs of its commit, and
    compare them with rounds/N.

    Raises UserError as `verify`, for a round that is not closed, and where the commit or the rounds before it are not
    here. The workspaces are removed at the end, also after an error.
    """
    from tasks.records.recorded import recorded
    from tasks.stage import rounds
    from tasks.stage.dvc_files import open_project

    note = rounds.read_note(root, number)
    space = Workspace(root, f"round-{number}-{os.getpid()}", workspace.resolve(root, note["commit"]))
    log("", f"round {number} was made from commit {space.commit[:DIGITS]}")
    with workspace.opened(space):
        try:
            stages = read_graph(space.root).select(["select"]).stages
            _make_params(space.root, stages, log)
            report = verify(space.root, stages, False, log)
            rebuilt = {finding.out: finding.rebuilt for finding in report.findings}
            makers = {out: record.stage for record in recorded(space.root).values() for out in record.outs}
        finally:
            workspace.remove(space)
    with open_project(root) as project:
        for out, name in ((rounds.MODEL, rounds.POLICY), (rounds.PREFERENCES, rounds.PAIRS)):
            path, stage = rounds.path_in(number, name), makers[out]
            kept, now = project.hash_at(root / path) or "", rebuilt.get(out)
            verdict: Verdict = "not rebuilt" if now is None else "same" if now == kept else "DIFFERS"
            report.findings.append(Finding(stage, path, kept, now, verdict))
    return report


def _make_params(project: Path, stages: Sequence[str], log: Log) -> None:
    """Run the stages that make files of parameters: without them nobody can say whether dvc.lock is up to date."""
    from tasks.stage.dvc_files import open_project

    with open_project(project) as opened:
        makers = set[str]().union(*map(opened.makers_of_params, stages))
    for name in (name for name in stages if name in makers):
        run_stage(project, name, False, None, partial(log, name), OPTIONS, environment(project))


@contextmanager
def _empty_workspace(root: Path, keep: bool) -> Iterator[Path]:
    """A workspace without files, with an empty DVC cache of its own; removed at the end unless `keep`."""
    space = Workspace(root, f"verify-{os.getpid()}", workspace.resolve(root, "HEAD"))
    with workspace.opened(space, own_cache=True, checkout=False):
        try:
            yield space.root
        finally:
            if keep:
                workspace.write_note(space, why_kept="by `leash verify --keep`")
            else:
                workspace.remove(space)


def environment(project: Path) -> Environment:
    """Variables with which a stage runs the code of the workspace at `project`, and sends nothing to MLflow."""
    database = f"sqlite:///{project / 'mlflow.db'}"
    return {**workspace.environment(project), "MLFLOW_TRACKING_URI": database, HOLD_VARIABLE: "1"}


def _require_room(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed:
        raise UserError(
            f"{root}: {needed / 2**30:.1f} GiB are needed for a clone and {free / 2**30:.1f} GiB are free; "
            "`leash clean` and `leash gc` free some"
        )


def _rebuild(root: Path, project: Path, what: Any, report: Report, log: Log) -> None:
    """Run the stages one after another; after the first failure the rest is not rebuilt."""
    variables = environment(project)
    for name in what.stages:
        record = what.records[name]
        if report.failure:
            report.findings += [Finding(name, out, value, None, "not rebuilt") for out, value in record.outs.items()]
            continue
        log(name, "begins")
        try:
            outcome = run_stage(project, name, False, None, partial(log, name), OPTIONS, variables)
        except (StageUserError, StageCrash) as error:
            report.failure, report.users_fault = str(error), isinstance(error, StageUserError)
            report.findings += [Finding(name, out, value, None, "not rebuilt") for out, value in record.outs.items()]
            continue
        found = _compare(root, project, record)
        report.findings += found
        same = all(finding.verdict == "same" for finding in found)
        log(name, f"rebuilt in {outcome.seconds:.0f} s: {'the same bytes' if same else 'DIFFERS'}")


def _compare(root: Path, project: Path, record: Any) -> list[Finding]:
    """Each output of the stage against its record."""
    from tasks.records.recorded import recorded

    rebuilt = recorded(project)[record.stage]
    other = tuple(path for path, value in record.inputs.items() if rebuilt.inputs.get(path) != value)
    exempt = _exemptions(root, record)
    findings = []
    for out, value in record.outs.items():
        now = rebuilt.outs.get(out)
        if now == value:
            findings.append(Finding(record.stage, out, value, now, "same"))
        else:
            verdict: Verdict = "differs" if other else "DIFFERS"
            size = _size(root, project, out, value)
            findings.append(Finding(record.stage, out, value, now, verdict, other, exempt, size))
    return findings


def _size(root: Path, project: Path, out: str, digest: str) -> str:
    """How large the difference between an output in the clone and the recorded one is."""
    from tasks.records.differences import READERS, difference
    from tasks.stage.dvc_files import open_project

    if Path(out).suffix not in READERS or not (project / out).is_file():
        return ""
    with open_project(root) as opened:
        present = opened.hash_at(root / out) == digest
        kept = [root / out] if present else [blob for _, blob in opened.cached(digest) if blob.is_file()]
    return difference(Path(out).suffix, kept[0].read_text(), (project / out).read_text()) if kept else ""


def _exemptions(root: Path, record: Any) -> tuple[str, ...]:
    """Why the run behind these outputs was exempt from byte identity: its parameters and its models' provenance."""
    from tasks.stage.models import NOT_DETERMINISTIC
    from tasks.stage.provenance import read

    found: dict[str, None] = {} if record.params.get("deterministic", True) else {NOT_DETERMINISTIC: None}
    for out in record.outs:
        own = read(root / out) if (root / out).is_dir() else None
        found |= dict.fromkeys(own["exemptions"]) if own else {}
    return tuple(found)


def _machine(root: Path) -> tuple[str, int | None]:
    """(the instruction set that torch uses here, `threads` of params.yaml)."""
    import torch

    from tasks.params.loader import PARAMS_FILE, read_threads

    return str(torch.backends.cpu.get_cpu_capability()), read_threads(root / PARAMS_FILE)


def render(report: Report) -> str:
    """The table, and one line that sums it up."""
    rows = [
        (one.stage, one.out, one.recorded[:DIGITS], (one.rebuilt or "-")[:DIGITS], one.words) for one in report.findings
    ]
    lines = [table([("stage", "out", "recorded", "rebuilt", "verdict"), *rows]), "", _summary(report)]
    if report.kept:
        lines.append(f"the clone is kept: {report.kept} (`leash clean` removes it)")
    return "\n".join(lines)


def _summary(report: Report) -> str:
    threads = f", {report.threads} threads" if report.threads else ""
    machine = f"CPU capability {report.cpu}{threads}"
    stages = len({finding.stage for finding in report.findings})
    if report.failure:
        return f"not verified: {report.failure} ({machine})"
    different = [finding for finding in report.findings if finding.verdict != "same"]
    if not different:
        return f"same: all {len(report.findings)} outs of {stages} stages have the recorded bytes ({machine})"
    return (
        f"DIFFERS: {len(different)} of {len(report.findings)} outs; first in {', '.join(report.origins)} ({machine}; "
        "another type of CPU may give other last bits)"
    )
