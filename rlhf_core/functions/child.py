"""The process of a reward function. `process.py` starts it as a script. It imports the standard library and the
function's file, nothing of this project."""

import contextlib
import importlib.util
import json
import math
import numbers
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

Score = Callable[[list[Any], list[str], list[dict[str, Any]]], Any]
OVER_MEMORY = "needs more memory than runtime.functions.memory_mb allows"


def main(path: Path, requests: int, replies: int, memory: int) -> None:
    """Fork: the child runs the function, and this process ends all of its group when its standard input is closed, by
    the stage or by the stage's death. The child does so too when its requests end, since this process ends with it.
    `memory`: bytes of address space."""
    worker = os.fork()
    if worker == 0:
        run(path, requests, replies, memory)
        os.killpg(0, signal.SIGKILL)
    os.close(requests)
    os.close(replies)
    threading.Thread(target=kill_at_end_of_input, daemon=True).start()
    _, status = os.waitpid(worker, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def kill_at_end_of_input() -> None:
    """Kill the group of this process, the function's own children included."""
    while os.read(0, 1024):
        pass
    os.killpg(0, signal.SIGKILL)


def run(path: Path, requests: int, replies: int, memory: int) -> None:
    """Load the function, and answer a line of JSON for each line of JSON."""
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for pipe in (requests, replies):
        os.set_inheritable(pipe, False)
    with os.fdopen(requests, "rb") as reader, os.fdopen(replies, "wb") as writer:
        try:
            function = load(path)
        except BaseException as error:  # also SystemExit
            send(writer, {"error": f"cannot be imported: {describe(error, path)}"})
            return
        if function is None:
            send(writer, {"error": "has no function `score(prompts, responses, rows)`"})
            return
        send(writer, {"ready": True})
        for line in reader:
            send(writer, answer(function, path, **json.loads(line)))


def load(path: Path) -> Score | None:
    """The function `score` of the file; None where it has none. Other files of its folder can be imported."""
    sys.path[0] = str(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found = getattr(module, "score", None)
    return found if callable(found) else None


def answer(
    function: Score, path: Path, prompts: list[Any], responses: list[str], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """`scores`, or `error` and, where it is known, the place `at` of the answer that it concerns."""
    count, only = len(responses), rows[0] if len(rows) == 1 else None
    try:
        return checked(function(prompts, responses, rows), count)
    except BaseException as error:  # also SystemExit
        columns = ""
        if isinstance(error, KeyError) and only is not None:
            columns = f"; the columns of its row: {', '.join(only) or 'none'}"
        return {"error": describe(error, path) + columns}


def checked(found: Any, count: int) -> dict[str, Any]:
    """The scores as floats, if they are as many finite numbers as there are answers."""
    try:
        values: Sequence[Any] = list(found)
    except TypeError:
        return {"error": f"returned {type(found).__name__}, not a list of numbers"}
    if len(values) != count:
        return {"error": f"returned {len(values)} scores for {count} answer{'s' * (count != 1)}"}
    scores = []
    for place, value in enumerate(values):
        if not isinstance(value, numbers.Real):
            return {"error": f"returned {type(value).__name__} ({repr(value)[:60]}), not a number", "at": place}
        if not math.isfinite(value):
            return {"error": f"returned {value}, not a finite number", "at": place}
        scores.append(float(value))
    return {"scores": scores}


def describe(error: BaseException, path: Path) -> str:
    """Type, message, and the last line of the user's file that was running."""
    if isinstance(error, MemoryError):
        return OVER_MEMORY
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} (line {error.lineno})"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"


def send(writer: BinaryIO, reply: dict[str, Any]) -> None:
    """One line."""
    writer.write(json.dumps(reply).encode() + b"\n")
    writer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
