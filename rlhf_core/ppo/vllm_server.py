"""The process of a vLLM server and its HTTP interface, over a Unix socket in a folder of this user's alone: the server
unpickles what is sent to it. vLLM itself is never imported."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.errors import UserError
from rlhf_core.ppo import vllm_keeper

PROGRAM = "LEASH_VLLM"
"""The environment variable with the path of the program `vllm`, which may belong to another environment."""
VERSION = "0.29"
"""The first vLLM with the endpoints below in their present form."""
ENDPOINTS = (
    "/v1/completions", "/sleep", "/wake_up", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update",
)  # fmt: skip
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the endpoints for sleep and weights
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # handles of the weights' memory are pickled
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SECONDS_TO_START = 900.0
SECONDS_TO_ANSWER = 3600.0


def program() -> str:
    """The path of the program `vllm`. Raises UserError where there is none."""
    named = os.environ.get(PROGRAM)
    beside = str(Path(sys.executable).parent)
    found = shutil.which(named or "vllm", path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if found is None:
        what = f"{PROGRAM}={named} is not a program" if named else "the program vllm is not installed"
        raise UserError(
            f"ppo.engine: vllm: {what}; install it in an environment of its own (pip install 'vllm>={VERSION}') and "
            f"set {PROGRAM} to its bin/vllm, or use engine: leash"
        )
    return found


class Server:
    """A running server for the model of a folder; it ends with this object or this process, and with it everything
    that it has started.

    Args:
        model: a folder with config.json and tokenizer; the weights come later.
        arguments: further arguments of `vllm serve`.
        device: the GPU, as in CUDA_VISIBLE_DEVICES; None: those of this process.

    Raises:
        UserError: vLLM is not installed, does not start, or is a version without the endpoints.
    """

    def __init__(self, model: Path, arguments: Sequence[str], device: str | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="leash-vllm-"))
        self.socket, self.log = self.folder / "socket", self.folder / "log"
        serve = [program(), "serve", str(model), "--uds", str(self.socket), *arguments]
        visible = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, vllm_keeper.__file__, *serve],
                env=os.environ | ENVIRONMENT | visible,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.end = weakref.finalize(self, _end, self.process, self.folder)
        try:
            self._wait()
            self._require_endpoints()
        except BaseException:
            self.end()
            raise

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The server's answer. Raises RuntimeError where it is an error or none comes."""
        return self._request("POST", path, body)

    def post_all(self, path: str, bodies: Sequence[Mapping[str, Any]], at_once: int) -> list[dict[str, Any]]:
        """The answers in the order of the requests, `at_once` of which wait side by side."""
        with ThreadPoolExecutor(max_workers=min(at_once, len(bodies))) as pool:
            return list(pool.map(lambda body: self.post(path, body), bodies))

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        connection = _Connection(self.socket)
        try:
            content = b"" if body is None else json.dumps(body).encode()
            connection.request(method, path, content, {"Content-Type": "application/json", "Connection": "close"})
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(f"vLLM gave no answer to {path}: {error}{self._last_line()}") from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise RuntimeError(
                f"vLLM answered {path} with {answer.status}: {' '.join(text.split())[:500]}{self._last_line()}"
            )
        found: dict[str, Any] = json.loads(text) if text.strip() else {}
        return found

    def _wait(self) -> None:
        """Until the server is ready."""
        until = time.monotonic() + SECONDS_TO_START
        while True:
            if self.process.poll() is not None:
                raise UserError(f"ppo.engine: vllm: the server ended while it started{self._last_line()}")
            with suppress(RuntimeError):
                self._request("GET", "/health")
                return
            if time.monotonic() > until:
                raise UserError(f"ppo.engine: vllm: not ready after {SECONDS_TO_START:.0f} s{self._last_line()}")
            time.sleep(0.2)

    def _require_endpoints(self) -> None:
        known = self._request("GET", "/openapi.json").get("paths", {})
        if missing := [path for path in ENDPOINTS if path not in known]:
            version = self._request("GET", "/version").get("version", "of unknown version")
            raise UserError(
                f"ppo.engine: vllm: the installed vLLM {version} has no {', '.join(missing)}; install vllm>={VERSION}"
            )

    def _last_line(self) -> str:
        """What the server printed last, for an error's end."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n") if self.log.exists() else []
        printed = [line.strip() for line in lines if line.strip()]
        return f"; its last line: {printed[-1][:300]}" if printed else ""


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=SECONDS_TO_ANSWER)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self.path))  # waits where many others do; with a timeout it would fail
        self.sock.settimeout(self.timeout)


def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """End the group of the process, and remove the folder."""
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(timeout=2 * vllm_keeper.SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
