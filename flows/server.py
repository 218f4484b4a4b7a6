"""The Prefect server: the configured one, one in the background (`leash up`), and one for a single run.

Servers that we start listen on this machine only, want a password of their own, and take no requests of other web
pages: other users of the machine reach the same ports. `prefect server start --background` is not used: its `stop`
signals a number from a file without a look at the process, and the server's log is lost."""

import atexit
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from flows import processes
from rlhf_core.errors import UserError
from rlhf_core.files import atomic
from rlhf_core.locks import held
from tasks.tracking.settings import without_credentials

RECORD = Path("work") / "prefect-server.json"
"""The process and the address of the server of `leash up`."""
STARTING = Path("work") / "prefect-up.lock"
"""Held by `leash up` while it starts the server."""
PASSWORD = Path("work") / "prefect-auth"
"""The user name and password of the server of `leash up`, as Prefect's settings take them; only the user reads it."""
BUSY_SECONDS = 20.0
START_SECONDS = 90.0
"""How long a server may take to answer: the first start makes its database."""

_temporary: "list[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes], Path]]" = []


def status(url: str, auth: str = "") -> int | None:
    """The HTTP status of a GET of `url`, sent with `auth` (`user:password`) where it is given; None without answer."""
    import httpx

    name, _, password = auth.partition(":")
    try:
        return httpx.get(url, auth=(name, password) if auth else None, timeout=3.0).status_code
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


def answers(url: str) -> bool:
    """Whether an HTTP server answers at `url` (Prefect: `http://127.0.0.1:4200/api`), with a status below 500."""
    return (status(without_credentials(url).rstrip("/") + "/health") or 500) < 500


def answers_soon(url: str) -> bool:
    """As `answers`, tried again for some seconds: a busy server is not a lost one."""
    end = time.monotonic() + BUSY_SECONDS
    while not (found := answers(url)) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def configured_url(root: Path) -> str | None:
    """The server that Prefect's settings name; else the one that `leash up` started, if it still runs."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    from prefect.settings import PREFECT_API_URL

    return PREFECT_API_URL.value() or _record(root).get("url")


def require(root: Path) -> str:
    """Make the configured server that of this process and of those it starts; its URL. Raises UserError where none is
    configured, where it does not answer, or refuses the password."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY

    url = configured_url(root)
    if url is None:
        raise UserError("no Prefect server is configured; start one with `leash up`, or set PREFECT_API_URL")
    shown = without_credentials(url)
    if not answers(url):
        raise UserError(f"no Prefect server answers at {shown}; start one with `leash up`, or correct PREFECT_API_URL")
    use(root, url)
    auth = PREFECT_API_AUTH_STRING.value()
    if not PREFECT_API_KEY.value() and status(f"{url}/admin/version", str(auth or "")) == 401:
        raise UserError(f"the Prefect server at {shown} wants another password; set PREFECT_API_AUTH_STRING")
    return url


def up(root: Path, port: int) -> str:
    """Start the server in the background, unless it runs; returns its API's URL once it answers.

    Raises UserError when the port is in use or the server does not start.
    """
    with held(root / STARTING, START_SECONDS, "starts the Prefect server"):
        if record := _record(root):
            if answers_soon(record["url"]):
                return record["url"]
            down(root)  # it hangs
            end = time.monotonic() + 5.0
            while not is_free(port) and time.monotonic() < end:  # its threads end after it
                time.sleep(0.1)
        log = root / "work" / "prefect-server.log"
        process, url = _start(port, log, _password(root))
        try:
            _wait_for(process, url, log)
            entry = {"pid": process.pid, "started": psutil.Process(process.pid).create_time(), "url": url}
            (root / RECORD).write_text(json.dumps(entry) + "\n", encoding="utf-8")
        except BaseException:
            processes.stop(process.pid, process, processes.SERVER_SIGNALS)
            raise
        return url


def down(root: Path) -> bool:
    """Stop the server that `up` started; returns whether there was one."""
    record = _record(root)
    (root / RECORD).unlink(missing_ok=True)
    if record:
        processes.stop(int(record["pid"]), signals=processes.SERVER_SIGNALS)
    return bool(record)


def start_temporary(root: Path) -> str:
    """Start a server for this process only, without pages or schedules; returns its API's URL at once. This process
    uses it.

    Prefect would start one itself, but in our process group, where Ctrl-C kills it before the end of the run is
    recorded, and with its log on the terminal. Prefect sends the last log lines while the interpreter ends, so the
    server stops in `atexit`. A guardian stops it when this process is killed.
    """
    password = f"leash:{secrets.token_urlsafe(24)}"
    log = root / "work" / "prefect-server-run.log"
    process, url = _start(_free_port(), log, password, "--no-ui", "--no-scheduler", "--no-late-runs")
    _temporary.append((process, processes.guard(process, processes.SERVER_SIGNALS), log))
    use(root, url, password)
    return url


def wait_for_temporary(url: str) -> None:
    """Return when the temporary server answers. Raises UserError when it does not start."""
    process, _, log = _temporary[0]
    _wait_for(process, url, log)


@atexit.register
def stop_temporary(signals: processes.StopSignals = processes.SERVER_SIGNALS) -> None:
    """Stop the temporary server; does nothing the second time."""
    while _temporary:
        process, guardian, _ = _temporary.pop()
        processes.stop(process.pid, process, signals)
        processes.dismiss(guardian)


def use(root: Path, url: str, password: str = "") -> None:
    """Make `url` the server of this process and of those it starts, with `password`, or that of `leash up` where it is
    that one; else the user's own one stays."""
    from prefect.context import refresh_global_settings_context

    os.environ["PREFECT_API_URL"] = url
    if password or _record(root).get("url") == url:
        os.environ["PREFECT_API_AUTH_STRING"] = password or _password(root)
    refresh_global_settings_context()


def _start(port: int, log: Path, password: str, *options: str) -> "tuple[subprocess.Popen[bytes], str]":
    if not is_free(port):
        raise UserError(f"port {port} is in use; stop what listens there, or choose another with --port")
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), *options]
    env = os.environ | {  # not on the command line, which other users can read
        "PREFECT_SERVER_API_AUTH_STRING": password,
        "PREFECT_API_AUTH_STRING": password,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://127.0.0.1:{port},http://localhost:{port}",
    }
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return process, f"http://127.0.0.1:{port}/api"


def _wait_for(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not (answers(url) and _listens(process.pid, url)):  # another program may be quicker to take the port
        if process.poll() is not None:
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
            raise UserError(f"the Prefect server ended with {process.returncode}: {last} (log: {log})")
        if time.monotonic() > deadline:
            raise UserError(f"the Prefect server did not answer at {url} within {START_SECONDS:.0f} s (log: {log})")
        time.sleep(0.1)


def _listens(pid: int, url: str) -> bool:
    """Whether the process, or one that it has started, listens at the port of `url`; True where that cannot be read."""
    try:
        main = psutil.Process(pid)
        found = [one for each in (main, *main.children(recursive=True)) for one in each.net_connections("tcp")]
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == urlsplit(url).port for one in found)


def _password(root: Path) -> str:
    """What is in `PASSWORD`; made where there is none."""
    path = root / PASSWORD
    if not path.exists() or not path.stat().st_size:  # empty: a full disk, or an editor
        with atomic(path) as fresh:
            fresh.touch(0o600)
            fresh.write_text(f"leash:{secrets.token_urlsafe(24)}", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _record(root: Path) -> dict[str, str]:
    """What `up` wrote, if that process still runs; else nothing."""
    try:
        record = json.loads((root / RECORD).read_text(encoding="utf-8"))
        alive = abs(psutil.Process(int(record["pid"])).create_time() - float(record["started"])) < 2.0
    except (OSError, ValueError, KeyError, psutil.Error):
        return {}
    return dict(record) if alive else {}


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
