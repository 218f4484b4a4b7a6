"""What MLflow shall show of a pipeline run, as files in `work/tracking/<pipeline>/`. Does not import mlflow.

    run.json                        parameters, commit and other tags of the pipeline's run
    <stage>-<key>/facts.json        one execution of a stage: status, times, device, parameters, hashes of its inputs
    <stage>-<key>/live.jsonl        its points and tags, one line each, appended while it runs
    <stage>-<key>/files/…           copies of its metrics, plots, samples and report
    sent-<hash of an address>       MLflow there has the files as they were at this time; the page of the run

A stage only writes these files. The exporter makes MLflow agree with them, now or later.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from rlhf_core.locks import held
from tasks.params.secrets import HIDDEN, is_secret
from tasks.tracking.settings import main_checkout, name_of_study, without_credentials

Status = Literal["FINISHED", "FAILED", "KILLED"]
RUN, FACTS, LIVE, FILES, SENT = "run.json", "facts.json", "live.jsonl", "files", "sent-"
FOREIGN_HOURS = 24.0
"""A stage of another machine on the same disk counts as running until its record is so old."""
LINK_ABOVE_BYTES = 8 * 2**20  # copying more could delay the stage
NOT_IN_NAMES = re.compile(r"[^\w/.\- :]")
SHOWN = {
    "preferences": ("data/preferences/preferences.jsonl",),
    "evaluate": ("metrics/summary.json", "plots/frontier.csv", "data/evaluate/answers.jsonl"),
    "report": ("report",),
}
"""What MLflow shows of a stage beside metrics/<stage>.json, plots/<stage>.csv and data/<stage>/samples.jsonl."""


def folder_of(root: Path) -> Path:
    """The folder of all records of the main checkout of `root`, those of its workspaces included."""
    return main_checkout(root) / "work" / "tracking"


def shown_files(stage: str) -> tuple[str, ...]:
    """The outputs of a stage that MLflow shows, relative to the project."""
    samples = () if stage == "preferences" else (f"data/{stage}/samples.jsonl",)
    return (f"metrics/{stage}.json", f"plots/{stage}.csv", *samples, *SHOWN.get(stage, ()))


def read(path: Path) -> dict[str, Any]:
    """A JSON file of a record; empty where it is missing or damaged."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of a record atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(content, ensure_ascii=False, default=str), encoding="utf-8", errors="backslashreplace")
    fresh.replace(path)


def name_of(run: Mapping[str, Any]) -> str:
    """The name of the record of a study or a pipeline run."""
    if run.get("kind") == "study":
        return f"study-{name_of_study(run['study'])}"
    return f"{run['key'][:12]}-{run['workspace']}"


def open_record(root: Path, run: Mapping[str, Any]) -> Path:
    """The record of the study or pipeline run `run` (`key`, `workspace`, `params`, `tags`, …); made where it is
    missing. Raises OSError, and UserError where another process holds the lock."""
    folder = folder_of(root) / name_of(run)
    with exclusive(root):
        known = read(folder / RUN)
        write(folder / RUN, {"created": now_ms(), **known, **run, "touched": now_ms()})
    return folder


def copy_files(root: Path, execution: Path, stage: str) -> None:
    """Copy the outputs of `stage` that MLflow shows into its execution; large ones become links. Raises OSError."""
    for name in shown_files(stage):
        source, target = root / name, execution / FILES / name
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if not file.is_file():
                continue
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            large = file.stat().st_size > LINK_ABOVE_BYTES and file.stat().st_dev == place.parent.stat().st_dev
            os.link(file, place) if large else shutil.copyfile(file, place)


class Live:
    """The record of a running stage. Its calls take milliseconds, and none fails: with a full disk a row is lost, with
    one warning."""

    def __init__(self, root: Path, record: Path, facts: Mapping[str, Any]) -> None:
        self.stage, self.folder = str(facts["stage"]), record / f"{facts['stage']}-{facts['key'][:12]}"
        self._root = root
        self._warned = False
        before = read(self.folder / FACTS)
        before = {} if before.get("status") == "FINISHED" else before  # else it goes on with it
        before.pop("ended", None)
        restarts = {"restarts": before.get("restarts", 0) + 1} if before else {}
        self._facts = {"started": now_ms(), **before, **facts, **this_process(), **restarts, "status": "RUNNING"}
        with self._warning():
            write(self.folder / FACTS, self._facts)
        self._append({})

    def points(self, values: Mapping[str, float | None], step: int) -> None:
        """Metrics of a step; None is left out."""
        self._append({"step": int(step), "metrics": {k: float(v) for k, v in values.items() if v is not None}})

    def tag(self, name: str, text: str) -> None:
        """A tag of the stage's run; the last value of a name is kept."""
        self._append({"tags": {name: text}})

    def end(self, status: Status) -> None:
        """Record how the stage has ended; copies its outputs where it is well."""
        with self._warning():
            if status == "FINISHED":
                copy_files(self._root, self.folder, self.stage)
            device = {"device": device_used()} if status == "FINISHED" else {}
            write(self.folder / FACTS, {**self._facts, **device, "status": status, "ended": now_ms()})

    def _append(self, line: dict[str, Any]) -> None:
        """One line in one system call. It begins with a line break: the last one may be incomplete, after a kill."""
        text = "\n" + json.dumps({"at": now_ms(), **line}, ensure_ascii=False, default=str)
        with self._warning(), (self.folder / LIVE).open("ab", buffering=0) as file:
            file.write(text.encode(errors="replace"))

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._warned:
                print(f"tracking: not recorded ({error}); the stage goes on", file=sys.stderr, flush=True)
            self._warned = True


def device_used() -> str:
    """The name of the GPU on which this process has computed; "cpu" where it has not used one."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # torch is not imported for it
    return str(cuda.get_device_name()) if cuda is not None and cuda.is_initialized() else "cpu"


def executions(record: Path) -> list[dict[str, Any]]:
    """The facts of all executions of a record with their `folder`, in the order of their begin. One whose process has
    died counts as KILLED; of one on another machine, one whose record is older than FOREIGN_HOURS."""
    found = []
    for path in record.glob(f"*/{FACTS}"):
        facts = read(path)
        if facts.get("status") == "RUNNING":
            touched = max(file.stat().st_mtime for file in (path, path.with_name(LIVE)) if file.exists())
            facts |= {} if is_alive(facts, touched) else {"status": "KILLED", "ended": int(touched * 1000)}
        if facts:
            found.append(facts | {"folder": path.parent})
    return sorted(found, key=lambda facts: (facts["started"], facts["stage"]))


def this_process() -> dict[str, Any]:
    """What `is_alive` recognises this process by."""
    me = psutil.Process()
    return {"pid": me.pid, "born": me.create_time(), "host": socket.gethostname()}


def is_alive(facts: Mapping[str, Any], touched: float) -> bool:
    """Whether the process of a record runs that was last `touched` at this second of the epoch; one on another machine
    counts as running for FOREIGN_HOURS."""
    if facts.get("host") != socket.gethostname():
        return time.time() - touched < FOREIGN_HOURS * 3600
    try:
        return bool(abs(psutil.Process(facts["pid"]).create_time() - facts["born"]) < 1.0)
    except psutil.Error:
        return False


def rows(execution: Path) -> tuple[list[tuple[str, int, int, float]], dict[str, str]]:
    """The points of live.jsonl as (name, step, milliseconds, value), the first of each name and step, and its tags. A
    line that a killed process has not finished is left out."""
    points: dict[tuple[str, int], tuple[str, int, int, float]] = {}
    tags: dict[str, str] = {}
    with suppress(OSError), (execution / LIVE).open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError, KeyError, AttributeError):
                row = json.loads(line)
                tags |= row.get("tags", {})
                for name, value in row.get("metrics", {}).items():
                    points.setdefault((name, row["step"]), (safe_name(name), row["step"], row["at"], value))
    return list(points.values()), tags


def pending(root: Path, mark: str = "") -> list[Path]:
    """The records of which the address with this mark (see `settings.uri_mark`) has not received all, the oldest first;
    without a mark all of them."""
    found = [path.parent for path in folder_of(root).glob(f"*/{RUN}")]
    found.sort(key=lambda folder: (read(folder / RUN).get("created", 0), folder.name))
    return [folder for folder in found if not mark or not has_received(folder, mark)]


def has_received(record: Path, mark: str) -> bool:
    """Whether the address with this mark has confirmed the record as it is now."""
    confirmation = record / f"{SENT}{mark}"
    return confirmation.is_file() and read(confirmation).get("changed") == changed_ns(record)


def changed_ns(record: Path) -> int:
    """When a file of the record was last changed, in nanoseconds of its file system's clock."""
    times = [0]
    for path in record.rglob("*"):
        if not path.name.startswith((SENT, ".")):
            with suppress(FileNotFoundError):  # another process replaces or removes it
                times.append(path.stat().st_mtime_ns if path.is_file() else 0)
    return max(times)


def confirm(record: Path, mark: str, changed: int, page: str = "") -> None:
    """Note that the address with this mark has received the record as it was when `changed_ns` returned this, and shows
    it at this page. Raises OSError."""
    write(record / f"{SENT}{mark}", {"changed": changed, "page": page})


def prune(root: Path, mark: str) -> None:
    """Remove the records that have arrived, without the newest of each workspace: what that one has executed does not
    count as restored there."""
    waiting, runs = pending(root, mark), {folder: read(folder / RUN) for folder in pending(root)}
    newest: dict[str, Path] = {}
    for folder, run in sorted(runs.items(), key=lambda item: item[1].get("touched", 0)):
        if "workspace" in run and Path(run["root"]).exists():
            newest[run["workspace"]] = folder
    for folder in runs.keys() - {*waiting, *newest.values()}:
        with exclusive(root):
            if has_received(folder, mark):  # no stage has begun in it
                shutil.rmtree(folder, ignore_errors=True)


def exclusive(root: Path) -> AbstractContextManager[object]:
    """Hold the lock of the records, for milliseconds: a record is not removed while a stage begins in it."""
    return held(folder_of(root) / "lock", 10.0, "writes the records of runs")


def now_ms() -> int:
    """Wall-clock time in milliseconds."""
    return time.time_ns() // 1_000_000


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested parameters as dotted names and text: {"ppo": {"kl": {"coef": 0.1}}} gives {"ppo.kl.coef": "0.1"}.

    Values except text are written as JSON; values of secret keys, also in lists, and the credentials in addresses are
    hidden.
    """
    flat: dict[str, str] = {}
    for key, value in params.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        elif is_secret(name):
            flat[safe_name(name)] = HIDDEN
        else:
            text = value if isinstance(value, str) else json.dumps(_shown(value, name), default=str)
            flat[safe_name(name)] = without_credentials(text)
    return flat


def _shown(value: Any, name: str) -> Any:
    """A value in a list without what is secret."""
    if isinstance(value, Mapping):
        return {key: HIDDEN if is_secret(f"{name}.{key}") else _shown(part, f"{name}.{key}")
                for key, part in value.items()}  # fmt: skip
    return [_shown(part, name) for part in value] if isinstance(value, list) else value


def safe_name(text: str) -> str:
    """`text` with the characters and the length that MLflow allows in names."""
    return NOT_IN_NAMES.sub("_", text)[:250]
