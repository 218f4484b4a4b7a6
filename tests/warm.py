"""Fast starts of Python for tests: `python -m dvc`, `-m flows.cli` and `-m tasks` are forked from a process that has
imported torch and transformers, but none of Leash's code, where they would import them for seconds each time.

What starts is a process as always: a child of the one that starts it, with its arguments, environment, folder, session,
process group and files, and with the code of the folder that it starts in; it runs a `sitecustomize.py` of PYTHONPATH.
Variables that the interpreter or a library reads only once select the source; a process has at most three. A new
interpreter starts for further ones, and for the stages that LEASH_TEST_NEW_INTERPRETERS names.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

IMPORTED = (
    "accelerate", "datasets", "dvc.cli", "dvc.commands.repro", "dvc.repo", "jaxtyping", "jinja2",
    "matplotlib.backends.backend_agg", "matplotlib.figure", "numpy", "pandas",
    "pandera.pandas", "peft", "psutil", "pyarrow.parquet", "pydantic", "ruamel.yaml", "safetensors.torch",
    "scipy.stats", "tokenizers", "torch", "transformers.trainer", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
READ_ONCE = (
    "PYTHON", "LC_", "LANG", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "MKL_", "MPL", "CUDA_", "TORCH", "LD_"
)  # fmt: skip
"""Beginnings of the names of such variables. (Libraries that read others at their import are not in IMPORTED.)"""
MODULES = {
    "dvc": True, "flows.cli": True, "tasks": False, "tests.rlhf_core.ppo.several_processes": False,
    "tests.rlhf_core.training.several_trainers": False,
}  # fmt: skip
"""What is forked, and whether it starts others: it then has a source of its own."""
COMMAND = re.compile(r"python -m tasks \w+")
"""A stage's command, which DVC gives to a shell."""
RECORD = "LEASH_TEST_RECORD"
"""The variable with the folder for what `record` notes."""
NEW_INTERPRETERS = "LEASH_TEST_NEW_INTERPRETERS"
"""The variable with the stages that start in new interpreters all the same, for example to show what they import."""
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
HOOK = "sitecustomize.py"
LIMIT = 200_000
"""Bytes of a request."""

_new_interpreter = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_new_interpreter)


class Source:
    """The process to fork from, as seen by the one that starts others; `constant` are the variables that it has read
    once."""

    def __init__(self, connection: socket.socket, constant: dict[str, str]) -> None:
        self.connection, self.constant = connection, constant

    def start(self, request: dict[str, Any], files: list[int]) -> int | None:
        """The number of a new child of this process; None where the source has ended."""
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # we inherit the child of a process that ends at once
        try:
            socket.send_fds(self.connection, [json.dumps(request).encode()], files)
            answer = self.connection.recv(64)
        except OSError:
            return None
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return int(answer) if answer else None


_sources: list[Source] = []
_lock = threading.Lock()
MOST_SOURCES = 3
"""Of a process: each takes several hundred megabytes."""


def make_source(constant: dict[str, str]) -> Source:
    """A source for this process, which ends with it."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import warm; warm.main({its.fileno()})"
    env = {name: value for name, value in os.environ.items() if not name.startswith(READ_ONCE)} | constant
    subprocess.Popen([sys.executable, "-c", code], pass_fds=[its.fileno()], env=env, start_new_session=True)
    its.close()
    return Source(mine, constant)


class Popen(subprocess.Popen[str]):
    """`subprocess.Popen` with fast starts of what is in MODULES."""

    def _execute_child(self, *positional: Any, **named: Any) -> None:
        """Where it forks, like the method that it replaces."""
        given = _signature.bind(self, *positional, **named).arguments
        pid = None
        if request := _request(given):
            constant = _read_once(request[0]["env"])
            with _lock:  # whether we inherit is a setting of the process
                source = next((one for one in _sources if one.constant == constant), None)
                if source is None and len(_sources) < MOST_SOURCES:
                    _sources.append(source := make_source(constant))
                pid = source.start(*request) if source is not None else None
        if pid is None:
            _new_interpreter(self, *positional, **named)
            return
        self.pid, self._child_created = pid, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[end] for end in ends))  # type: ignore[attr-defined]


def _request(given: dict[str, Any]) -> tuple[dict[str, Any], list[int]] | None:
    """What to fork, and its files 0 to 2; None for what needs a new interpreter."""
    env = {os.fsdecode(n): os.fsdecode(v) for n, v in (os.environ if given["env"] is None else given["env"]).items()}
    folders = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if (
        sys.platform != "linux"
        or any(given[name] for name in ("preexec_fn", "pass_fds", "shell", "executable"))
        or (words := _words(given["args"], env)) is None
        or (words[0] == "tasks" and words[-1] in env.get(NEW_INTERPRETERS, "").split())
    ):
        return None
    request = {
        "words": words,
        "env": env,
        "path": folders,
        "cwd": str(Path(os.fsdecode(given["cwd"] or os.curdir)).resolve()),
        "session": given["start_new_session"],
        "group": given["process_group"],
    }
    ends = (given["p2cread"], given["c2pwrite"], given["errwrite"])
    return request, [number if end == -1 else end for number, end in enumerate(ends)]


def _words(command: Any, env: dict[str, str]) -> list[str] | None:
    """What follows `python -m` in a command of this interpreter, also within `sh -c`; None for any other."""
    words = [] if isinstance(command, (str, bytes, os.PathLike)) else [os.fsdecode(word) for word in command]
    if len(words) > 2 and words[-2] == "-c" and COMMAND.fullmatch(words[-1]):
        words = words[-1].split()
    if len(words) < 3 or words[1] != "-m" or words[2] not in MODULES:
        return None
    return words[2:] if shutil.which(words[0], path=env.get("PATH")) == sys.executable else None


def record() -> None:
    """Note in `<stage>.json` which modules this stage's process has loaded and which files it opened for reading."""
    opened: set[str] = set()

    def on_event(event: str, details: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(details[0], str | bytes):
            path = Path(os.fsdecode(details[0])).absolute()
            if not details[2] & (os.O_WRONLY | os.O_RDWR) and path.is_file():
                opened.add(str(path))

    def write() -> None:
        content = {"modules": sorted(sys.modules), "opened": sorted(opened)}
        Path(os.environ[RECORD], f"{sys.orig_argv[-1]}.json").write_text(json.dumps(content), encoding="utf-8")

    sys.addaudithook(on_event)
    atexit.register(write)


def _read_once(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_ONCE) and name != "PYTHONPATH"}


def main(connection: int) -> None:
    """The source of the tests. Returns in each process that was forked, when what it runs has ended."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _run(*_serve(socket.socket(fileno=connection)))


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork at each request, and return it in the new process. Ends with the process that makes the requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        request, files, *_ = socket.recv_fds(connection, LIMIT, 3)
        if not request:
            os._exit(0)
        (wait, go), (answer, say) = os.pipe(), os.pipe()
        between = os.fork()
        if between == 0:
            if pid := os.fork():
                os.write(say, str(pid).encode())
                os._exit(0)
            os.close(go)
            os.read(wait, 1)  # until the process between has ended, and our parent is the one that made the request
            for end in (wait, answer, say):
                os.close(end)
            connection.close()
            return json.loads(request), list(files)
        os.waitpid(between, 0)
        connection.send(os.read(answer, 64))
        for end in (wait, go, answer, say, *files):
            os.close(end)


def _run(request: dict[str, Any], files: list[int]) -> None:
    """Be the process of the request."""
    if request["session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    module, *words = request["words"]
    if MODULES[module]:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            nothing = os.open(os.devnull, os.O_RDWR)
            for end in (0, 1, 2, *files):
                os.dup2(nothing, end)
            mine.close()
            _run(*_serve(its))
            return
        its.close()
        _sources[:] = [Source(mine, _read_once(request["env"]))]
        subprocess.Popen._execute_child = Popen._execute_child  # type: ignore[attr-defined]
    for number, end in enumerate(files):
        os.dup2(end, number)
        os.close(end)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        setattr(sys, name, os.fdopen(number, mode, buffering=1, closefd=False))  # those before know the old files
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    os.chdir(request["cwd"])
    sys.path[:2] = [request["cwd"], *request["path"]]  # behind them, what the interpreter has by itself
    sys.argv, sys.orig_argv = ["-m", *words], [sys.executable, "-m", module, *words]
    ctypes.CDLL(None).prctl(PR_SET_NAME, module.encode(), 0, 0, 0)  # /proc/…/cmdline is that of the source
    hooks = (Path(folder, HOOK) for folder in request["path"])
    if hook := next((path for path in hooks if path.is_file()), None):
        exec(compile(hook.read_text(encoding="utf-8"), str(hook), "exec"), {"__name__": hook.stem})
    runpy._run_module_as_main(module)  # type: ignore[attr-defined]
