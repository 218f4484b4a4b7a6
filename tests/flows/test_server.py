"""`leash up`: a server in the background, found again, and stopped."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import server
from rlhf_core.errors import UserError
from tests.conftest import call, commit


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with temporary_settings(restore_defaults={PREFECT_API_URL}):  # other tests of this process have a server
        yield


@pytest.mark.slow
def test_up_is_found_again_and_replaced_where_it_hangs(isolated: None, tmp_path: Path) -> None:
    port = server._free_port()
    url = server.up(tmp_path, port)
    try:
        assert url == f"http://127.0.0.1:{port}/api"
        assert server.answers(url)
        first = psutil.Process(server._record(tmp_path)["pid"])
        assert server.up(tmp_path, port) == url
        assert server._record(tmp_path)["pid"] == first.pid, "a second one was started"
        assert server.configured_url(tmp_path) == url

        for process in (first, *first.children(recursive=True)):
            process.suspend()
        assert server.up(tmp_path, port) == url
        assert server._record(tmp_path)["pid"] != first.pid
        assert server.answers(url)
    finally:
        assert server.down(tmp_path)
    assert not server.answers(url)
    assert server.down(tmp_path) is False


def test_an_answer_of_another_program_is_not_that_of_the_server(prefect_api: str, tmp_path: Path) -> None:
    """It was quicker to take the port."""
    log = tmp_path / "log"
    log.write_text("address already in use\n", encoding="utf-8")
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); raise SystemExit(1)"]) as process,
        pytest.raises(UserError, match="ended with 1: address already in use"),
    ):
        server._wait_for(process, prefect_api, log)


def test_a_taken_port_is_an_error_of_the_user(isolated: None, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UserError, match=r"port .* is in use"):
            server.up(tmp_path, other.getsockname()[1])


def test_a_record_of_another_process_is_no_server(isolated: None, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    entry = f'{{"pid": {os.getpid()}, "started": 1.0, "url": "http://127.0.0.1:9/api"}}'
    (tmp_path / "work" / "prefect-server.json").write_text(entry)
    assert server.configured_url(tmp_path) is None
    started = psutil.Process().create_time()
    (tmp_path / "work" / "prefect-server.json").write_text(entry.replace("1.0", str(started)))
    assert server.configured_url(tmp_path) == "http://127.0.0.1:9/api"


def test_refusals_count_as_answers_and_silence_does_not(prefect_api: str) -> None:
    assert server.answers(prefect_api)
    assert server.answers(f"{prefect_api}/no-such-page")
    assert not server.answers("http://127.0.0.1:1/api")
    assert not server.answers("no url")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "print('The dashboard is disabled', flush=True); raise SystemExit('database is locked')",
            "ended with 1: database is locked",
        ),
        ("print('The dashboard is disabled'); import time; time.sleep(60)", "did not answer at http://127.0.0.1:1/api"),
    ],
)
def test_why_a_server_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str) -> None:
    monkeypatch.setattr(server, "START_SECONDS", 2.0)
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output)
    if "raise" in code:
        process.wait()
    try:
        with pytest.raises(UserError, match=says):
            server._wait_for(process, "http://127.0.0.1:1/api", log)
    finally:
        process.kill()
        process.wait()


def test_a_server_that_wants_another_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(server, "status", lambda url, auth="": 200 if url.endswith("/health") else 401)
    monkeypatch.setattr(server, "use", lambda root, url: None)
    monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@127.0.0.1:4200/api")
    with pytest.raises(UserError, match="wants another password; set PREFECT_API_AUTH_STRING") as refused:
        server.require(tmp_path)
    assert "secret" not in str(refused.value)


class Refusal(BaseHTTPRequestHandler):
    """A proxy that forwards nothing."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_error(403)

    do_POST = do_CONNECT = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.mark.slow
@pytest.mark.chosen("False")
@pytest.mark.parametrize("dead", [True, False])
def test_servers_of_this_machine_are_reached_without_a_proxy(
    toy: Callable[..., Path],
    leash: Callable[..., "subprocess.Popen[str]"],
    monkeypatch: pytest.MonkeyPatch,
    dead: bool,
) -> None:
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    proxy.asked = []  # type: ignore[attr-defined]
    Thread(target=proxy.serve_forever, daemon=True).start()
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        for spelling in (name, name.lower()):
            monkeypatch.setenv(spelling, "http://127.0.0.1:1" if dead else f"http://127.0.0.1:{proxy.server_port}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    root = toy({"one": ("work", [])})
    process = leash(root, "run")
    printed, errors = process.communicate(timeout=100)
    proxy.shutdown()
    assert (process.returncode, errors) == (0, ""), printed + errors
    assert [path for path in proxy.asked if "127.0.0.1" in path or "localhost" in path] == []  # type: ignore[attr-defined]


def test_a_project_has_prefect_state_of_its_own_and_the_users_settings(
    toy: Callable[..., Path], tmp_path: Path
) -> None:
    root = toy({"one": ("work", [])})
    commit(root)
    call(root, "git", "worktree", "add", "--quiet", "work/tree")
    profiles = tmp_path / ".prefect" / "profiles.toml"
    profiles.parent.mkdir()
    profiles.write_text('active = "a"\n[profiles.a]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n', encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = kept | {"HOME": str(tmp_path), "PYTHONPATH": str(Path(server.__file__).parents[1])}
    code = (
        "from flows.environment import use_own_prefect_home as use; use(); "
        "from prefect.settings import get_current_settings as s; print(s().home, s().api.url)"
    )
    for folder in (root, root / "work" / "tree"):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(root / "work" / "prefect"), "http://127.0.0.1:9/api"]
