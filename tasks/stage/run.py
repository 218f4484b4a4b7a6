"""The main function of every stage: typed parameters, checked inputs, a state folder, tracking, and outputs that appear
all together."""

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import psutil

from rlhf_core.errors import UserError, is_out_of_memory
from tasks.datasets.jsonl import Row
from tasks.params.loader import is_switched_off, parse, read_yaml
from tasks.schemas.validation import load
from tasks.stage import provenance, state
from tasks.stage.definition import Definition, is_code, pipeline_identity
from tasks.stage.dvc_files import Project, open_project
from tasks.stage.interrupts import Interrupts
from tasks.stage.outputs import Outputs
from tasks.stage.pipeline_run import describe, report_results
from tasks.stage.stage import Common, Model, Stage
from tasks.stage.versions import require_declared_versions
from tasks.stage.workers import end_watch, failure_of_worker, is_worker, report_failure, run_as_worker
from tasks.tracking.settings import OUTCOME_VARIABLE
from tasks.tracking.tracker import Tracker

VERSIONS = "tasks/stage/versions.json"
FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "database or disk is full",
    "basic_ios::clear: iostream error",
)
"""Messages of libraries about a full disk."""

CLOCK_SECONDS = 1.0
"""Resolution of the start time of a process."""

Execute = Callable[[Stage[Model]], None]


def run(name: str, model: type[Model], execute: Execute[Model], tracked: bool = True) -> NoReturn:
    """Run a stage and leave the process: 0 done, 2 a user's error (one line), 130 interrupted, 1 a crash
    (traceback)."""
    interrupts = Interrupts()
    run_as_worker() if is_worker() else interrupts.install()
    code, message, key = 0, "", ""
    try:
        key = _run(name, model, execute, tracked, interrupts)
    except UserError as error:
        code, message = 2, " ".join(str(error).split("\n"))
    except KeyboardInterrupt:
        code, message = 130, "interrupted; the same command continues"
    except Exception as error:
        code, message = _missing_resource(error) or failure_of_worker() or (1, f"{type(error).__name__}: {error}")
        if code == 1:
            traceback.print_exc()
    end_watch()
    if code and is_worker():
        report_failure(code, message)
    if code and code != 1 and not is_worker():
        print(f"{name}: {message}", file=sys.stderr, flush=True)
    if not is_worker():
        _report_outcome({"stage": name, "exit": code, "message": message, "key": key})
    sys.exit(code)


def _missing_resource(error: Exception) -> tuple[int, str] | None:
    """Exit code and message for a full disk or memory; None where the stage failed for another reason."""
    if (where := _full_disk(error)) is not None:
        return 2, f"no space left on the device ({where}); free some, then run it again: nothing is lost"
    if is_out_of_memory(error):
        return 2, f"out of memory ({error}); lower batch_size or micro_batch_size of this stage, or stop other programs"
    return None


def _full_disk(error: BaseException) -> str | None:
    """What is full, when a full disk caused `error`; None otherwise.

    Libraries wrap it: safetensors and tokenizers raise their own errors with the system's text, SQLite reports that the
    disk is full, and torch's writer reports a broken stream.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in chain:
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return str(link.filename or "the disk")
        if any(sign in str(link) for sign in FULL):
            return "the disk"
    return None


def _report_outcome(outcome: dict[str, Any]) -> None:
    if path := os.environ.get(OUTCOME_VARIABLE):
        with suppress(OSError), Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(outcome, ensure_ascii=False) + "\n")


def _run(name: str, model: type[Model], execute: Execute[Model], tracked: bool, interrupts: Interrupts) -> str:
    """The contract, step by step. Returns the stage key."""
    recorded_later = state.under_dvc(name)
    quiet_libraries()
    content = read_yaml()
    params = parse(model, content.get(name, {}), name)
    common = parse(Common, {key: content[key] for key in Common.model_fields if key in content})
    with open_project(Path()) as project, state.locked(project.root, name):
        definition, root = Definition(name, project), project.root
        if VERSIONS in definition.inputs:
            require_declared_versions()
        hashes, blocks = definition.hashes(), definition.blocks(content)
        reads = not is_switched_off(content, name)
        if reads:
            definition.require_intact(hashes)
        if recorded_later:
            require_older_code(definition, psutil.Process().create_time())
        rows = load(root, definition.inputs) if reads else {}
        key = definition.key(content, hashes)
        state_dir, continues = state.begin(definition, key)
        tracked = tracked and common.runtime.tracking and not is_worker()
        tracker = _open_tracker(definition, content, key, hashes, rows, continues) if tracked else None
        position, total = definition.position
        stage = Stage(
            name=name,
            key=key,
            root=root,
            params=params,
            common=common,
            blocks=blocks,
            state_dir=state_dir,
            outputs=Outputs(root, definition.outs),
            tracker=tracker,
            label=f"[{position}/{total} {name}]",
            rows=rows,
            hashes=hashes,
            conclude=partial(_conclude, tracker, project, content),
            interrupts=interrupts,
        )
        with _tracked(stage):
            execute(stage)
            if is_worker():
                return key
            _commit(stage, definition, content)
        state.end(state_dir, recorded_later)
    return key


def _commit(stage: Stage[Any], definition: Definition, content: dict[str, Any]) -> None:
    """Put the outputs in place. Raises UserError when an input or parameter changed during the run: DVC would record
    the new one."""
    before = {**stage.hashes, **definition.tracked(content)}
    now = definition.hashes() | definition.tracked(read_yaml())
    if changed := sorted(name for name in before if before[name] != now.get(name)):
        raise UserError(f"{', '.join(changed)} changed while the stage ran; nothing was recorded, run it again")
    provenance.write(definition, content, stage.hashes, stage.outputs, stage.exemptions)
    stage.outputs.commit()
    if stage.tracker:
        report_results(stage.tracker, stage.name, stage.root, stage.metrics, stage.hashes)
    for act in stage.afterwards:
        act()


def quiet_libraries() -> None:
    """Switch off progress bars and notices of transformers, unless TRANSFORMERS_VERBOSITY is set."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    transformers = sys.modules.get("transformers")
    if transformers is not None and "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()


def _open_tracker(
    definition: Definition,
    content: dict[str, Any],
    key: str,
    hashes: Mapping[str, str],
    rows: Mapping[str, list[Row]],
    continues: bool,
) -> Tracker:
    pipeline = pipeline_identity(definition.project, content)
    tracker = Tracker.open(definition.project.root, definition.name, key, pipeline, continues=continues)
    tracker.params(definition.tracked(content))
    for path in definition.inputs:
        if path in rows or path.startswith("data/raw"):
            tracker.inputs(Path(path).stem, path, hashes[path])
    return tracker


def _conclude(tracker: Tracker | None, project: Project, content: dict[str, Any]) -> None:
    if tracker:
        describe(tracker, project, content)
        tracker.close_parent("FINISHED")


@contextmanager
def _tracked(stage: Stage[Any]) -> Iterator[None]:
    """Close the run with its status, and remove uncommitted outputs when the stage fails."""
    status: Literal["FINISHED", "FAILED", "KILLED"] = "FAILED"
    try:
        yield
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        if status != "FINISHED":
            stage.outputs.discard()
        if stage.tracker:
            if status != "FINISHED":
                stage.tracker.close_parent(status)
            stage.tracker.close(status)


def require_older_code(definition: Definition, started: float) -> None:
    """Raise UserError when code of the stage was edited after this process `started` (seconds since 1970): DVC would
    record other code than it has loaded."""
    root = definition.project.root
    code = [path for path in definition.inputs if is_code(path)]
    edited = [path for path in code if _newest(root / path) > started + CLOCK_SECONDS]
    if edited:
        raise UserError(f"{', '.join(edited)} changed while the stage started; run it again")


def _newest(path: Path) -> float:
    """When a file, or the newest file below a folder, was last changed, without Python's caches."""
    files = [file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return max((file.stat().st_mtime for file in files or [path]), default=0.0)
