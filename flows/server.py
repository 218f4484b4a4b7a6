"""The Prefect server: is one answering, start one in the background (`leash up`), stop it, or lend one for a single
run. No flows here."""

import atexit
import http.client
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from flows import processes
from flows.guardian import Guardian
from rlhf_core.errors import UserError
from tasks.tracking.settings import without_credentials

START_SECONDS = 90.0
"""How long a server may take to answer: the first start makes its database."""

_lent: "list[tuple[subprocess.Popen[bytes], Guardian]]" = []


def answers(url: str, path: str = "/health") -> bool:
    """Whether anything speaks HTTP at `url` (Prefect: `http://127.0.0.1:4200/api`); its refusals count as answers."""
    try:
        with urllib.request.urlopen(without_credentials(url).rstrip("/") + path, timeout=3.0):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError, http.client.HTTPException):
        return False


def configured_url(root: Path) -> str | None:
    """The server that Prefect is told to use, by its settings; else the one that `leash up` started and that lives."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    from prefect.settings import PREFECT_API_URL

    if url := PREFECT_API_URL.value():
        return str(url)
    record = _record(root)
    return str(record["url"]) if record else None


def up(root: Path, port: int) -> str:
    """Start the server in the background, on this machine only; returns its API's URL once it answers.

    Raises UserError when the port is taken or the server does not come up.
    """
    if record := _record(root):
        return str(record["url"])
    folder = root / "work"
    folder.mkdir(exist_ok=True)
    process, url = _start(port, folder / "prefect-server.log", [])
    entry = {"pid": process.pid, "started": psutil.Process(process.pid).create_time(), "url": url}
    _record_path(root).write_text(json.dumps(entry) + "\n", encoding="utf-8")
    return url


def down(root: Path) -> bool:
    """Stop the server that `up` started; returns whether there was one."""
    record = _record(root)
    _record_path(root).unlink(missing_ok=True)
    if record:
        processes.stop(int(record["pid"]), ladder=processes.SERVER_LADDER)
    return record is not None


def start_temporary(log: Path) -> str:
    """Start a server for this process alone, without pages or schedules; returns its API's URL.

    Prefect would start one itself, but inside our process group, where Ctrl-C kills it before it hears how the run
    ended, and with its log on the terminal. It must outlive the last log line, which Prefect sends while the
    interpreter ends; hence `atexit`. A guardian stops it when this process is killed.
    """
    guardian = Guardian(None)
    process, url = _start(_free_port(), log, ["--no-ui", "--no-scheduler", "--no-late-runs"], guardian)
    _lent.append((process, guardian))
    return url


@atexit.register
def stop_temporary(ladder: processes.Ladder = processes.SERVER_LADDER) -> None:
    """Stop what was lent; does nothing the second time."""
    while _lent:
        process, guardian = _lent.pop()
        processes.stop(process.pid, process, ladder)
        guardian.dismiss()


def use(url: str) -> None:
    """Make `url` the server of this process and of those it starts."""
    from prefect.context import refresh_global_settings_context

    os.environ["PREFECT_API_URL"] = url
    refresh_global_settings_context()


def _start(
    port: int, log: Path, options: list[str], guardian: Guardian | None = None
) -> "tuple[subprocess.Popen[bytes], str]":
    if not is_free(port):
        raise UserError(f"port {port} is taken; stop what listens there, or choose another with --port")
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    if guardian is not None:
        guardian.watch(process.pid, processes.SERVER_LADDER)
    url = f"http://127.0.0.1:{port}/api"
    try:
        _wait_for(process, url, log)
    except BaseException:
        processes.stop(process.pid, process, processes.SERVER_LADDER)
        raise
    return process, url


def _wait_for(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "no word")
            raise UserError(f"the Prefect server did not start: {said} (all of it: {log})")
        time.sleep(0.1)


def _record_path(root: Path) -> Path:
    return root / "work" / "prefect-server.json"


def _record(root: Path) -> dict[str, str | float] | None:
    """What `up` wrote, as long as that very process lives."""
    try:
        record = json.loads(_record_path(root).read_text(encoding="utf-8"))
        alive = abs(psutil.Process(int(record["pid"])).create_time() - float(record["started"])) < 2.0
    except (OSError, ValueError, KeyError, psutil.Error):
        return None
    return record if alive else None


def is_free(port: int) -> bool:
    """Whether a server on this machine could listen at `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
