"""Runs a stage: typed parameters, checked inputs, GPUs and processes, a state folder, tracking, and outputs that appear
all together. The stage's own file, and torch with it, is imported only when all of this is ready."""

import gc
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import psutil

from rlhf_core.config.block import Block
from rlhf_core.errors import UserError, did_you_mean, is_out_of_memory
from rlhf_core.progress import listening
from tasks.params.loader import parse, read_yaml, why_switched_off
from tasks.params.stages import STAGES, params_model
from tasks.schemas.validation import load
from tasks.stage import provenance, state, workers
from tasks.stage.definition import require_untracked
from tasks.stage.dvc_files import Definition, open_project
from tasks.stage.gpus import WITHOUT_GPU, claim_gpus
from tasks.stage.interrupts import Interrupts
from tasks.stage.outputs import Outputs
from tasks.stage.pipeline_run import WITHOUT_RUN, Tracking
from tasks.stage.stage import Common, Stage
from tasks.stage.switched_off import write_switched_off
from tasks.stage.versions import require_declared_versions
from tasks.stage.workers import is_worker
from tasks.tracking.record import Status

VERSIONS = "tasks/stage/versions.json"
FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "database or disk is full",
    "basic_ios::clear: iostream error",
)
"""Messages about a full disk: of the system, also inside errors of safetensors and tokenizers; SQLite's; torch's."""

CLOCK_SECONDS = 1.0
"""Resolution of the start time of a process."""

Load = Callable[[], Callable[[Stage[Any]], None]]
"""Imports a stage; returns its function `execute`."""


def main(words: Sequence[str]) -> NoReturn:
    """`python -m tasks STAGE`, and leave the process: see `run`. 2 without the name of a stage."""
    if len(words) == 1 and words[0] in STAGES:
        run(words[0], params_model(words[0]), lambda: import_module(f"tasks.{words[0]}").execute)
    wrong = f"{words[0]}: no such stage{did_you_mean(words[0], STAGES)}\n" if words else ""
    print(f"{wrong}python -m tasks STAGE; the stages: {', '.join(STAGES)}", file=sys.stderr)
    sys.exit(2)


def run(name: str, model: type[Block], load_stage: Load) -> NoReturn:
    """Run a stage and leave the process: 0 done, 2 a user's error (one line), 130 interrupted, 1 a crash
    (traceback)."""
    interrupts = Interrupts()
    workers.run_as_worker() if is_worker() else interrupts.install()
    code, message, key = 0, "", ""
    try:
        key = _run(name, model, load_stage, interrupts)
    except UserError as error:
        code, message = 2, " ".join(str(error).split("\n"))
    except KeyboardInterrupt:
        code, message = 130, "interrupted; the same command continues"
    except Exception as error:
        chain = "".join(traceback.format_exception(error))  # libraries wrap the error of the system
        if any(sign in chain for sign in FULL):
            where = getattr(error, "filename", None) or "the disk"
            code, message = 2, f"no space left on the device ({where}); free some, then run it again: nothing is lost"
        elif is_out_of_memory(error):
            advice = "lower batch_size or micro_batch_size of this stage, or stop other programs"
            code, message = 2, f"out of memory ({error}); {advice}"
        else:
            code, message = workers.failure_of_worker() or (1, f"{type(error).__name__}: {error}")
        if code == 1:
            traceback.print_exc()
    workers.end_watch()
    if is_worker():
        if code:
            workers.report_failure(code, message)
        sys.exit(code)
    if code not in (0, 1):
        print(f"{name}: {message}", file=sys.stderr, flush=True)
    workers.write_outcome(name, code, message, key)
    sys.exit(code)


def _import(load_stage: Load) -> Callable[[Stage[Any]], None]:
    """The stage's function. Without the garbage collector, which would go through all modules several times and once
    more at the exit: 1.4 of 3.8 seconds."""
    gc.disable()
    try:
        return load_stage()
    finally:
        if not gc.get_freeze_count():  # again only where tests run several stages in one process
            gc.freeze()
        gc.enable()


def _run(name: str, model: type[Block], load_stage: Load, interrupts: Interrupts) -> str:
    """The contract, step by step. Returns the stage key."""
    recorded_later = state.under_dvc(name)
    quiet_libraries()
    content = read_yaml()
    params = parse(model, content.get(name, {}), name)
    common = parse(Common, {key: content[key] for key in Common.model_fields if key in content})
    with open_project(Path()) as project, state.locked(project.root, name):
        definition, root = project.stage(name), project.root
        hashes, outputs = definition.hashes(), Outputs(root, [out.path for out in definition.outs])
        require_untracked(root, [out.path for out in definition.outs if out.in_cache])
        if VERSIONS in hashes:
            require_declared_versions()
        key = definition.key(content, hashes)
        label = f"[{project.stages.index(definition) + 1}/{len(project.stages)} {name}]"
        if why := why_switched_off(content, name):
            if is_worker():
                return key
            with outputs:
                write_switched_off(outputs, name, why)
                _commit(outputs, definition, content, hashes, [])
            print(f"{label} {name} is switched off ({why})", flush=True)
            return key
        definition.require_intact(hashes, recorded_later)
        if recorded_later:
            require_older_code(root, psutil.Process().create_time())
        rows = load(root, list(hashes))
        processes = workers.requested_processes(content, name)
        if name not in WITHOUT_GPU:
            claim_gpus(processes)
        state_dir = state.begin(definition, key)
        resumed = any(state_dir.iterdir())
        workers.start_workers(name, processes)
        if name in STAGES and name not in WITHOUT_GPU and not is_worker():  # imports alone take seconds
            print(f"{label} starts", flush=True)
        execute = _import(load_stage)
        quiet_libraries()
        tracked = common.runtime.tracking and name not in WITHOUT_RUN and not is_worker()
        tracking = Tracking.begin(definition, content, key, hashes, resumed) if tracked else None
        stage = Stage(
            name=name,
            key=key,
            root=root,
            params=params,
            common=common,
            blocks=definition.blocks(content),
            state_dir=state_dir,
            outputs=outputs,
            live=tracking.live if tracking else None,
            label=label,
            rows=rows,
            hashes=hashes,
            interrupts=interrupts,
        )
        status: Status = "FAILED"
        try:
            with outputs, listening(stage.watch):
                execute(stage)
                if is_worker():
                    return key
                _commit(outputs, definition, content, hashes, stage.exemptions)
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            if tracking:
                tracking.end(status)
        state.end(state_dir, recorded_later)
    return key


def _commit(
    outputs: Outputs,
    definition: Definition,
    content: dict[str, Any],
    hashes: Mapping[str, str],
    exemptions: Sequence[str],
) -> None:
    """Put the outputs in place. Raises UserError when an input or parameter changed during the run: DVC would record
    the new one."""
    before = {**hashes, **definition.tracked(content)}
    now = definition.hashes() | definition.tracked(read_yaml())
    if changed := sorted(name for name in before if before[name] != now.get(name)):
        raise UserError(f"{', '.join(changed)} changed while the stage ran; nothing was recorded, run it again")
    provenance.write(definition, content, hashes, outputs, exemptions)
    outputs.commit()


def require_older_code(root: Path, started: float) -> None:
    """Raise UserError when a module that is loaded was edited after this process `started` (seconds since 1970): DVC
    would record other code than this."""
    files = [Path(getattr(module, "__file__", None) or "") for module in sys.modules.values()]
    names = [file.relative_to(root).as_posix() for file in files if file.is_relative_to(root)]
    if edited := [name for name in names if (root / name).stat().st_mtime > started + CLOCK_SECONDS]:
        raise UserError(f"{', '.join(sorted(edited))} changed while the stage started; run it again")


def quiet_libraries() -> None:
    """Switch off progress bars and notices of transformers, unless TRANSFORMERS_VERBOSITY is set."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    transformers = sys.modules.get("transformers")
    if transformers is not None and "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
