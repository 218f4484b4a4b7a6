"""`leash up`: a server in the background, found again, and stopped."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flows import server
from rlhf_core.errors import UserError
from tests.conftest import call, commit


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def test_up_found_again_and_down(isolated: None, tmp_path: Path) -> None:
    port = server._free_port()
    url = server.up(tmp_path, port)
    try:
        assert url == f"http://127.0.0.1:{port}/api"
        assert server.answers(url)
        assert server.up(tmp_path, port) == url, "a second one was started"
        record = server._record(tmp_path)
        assert record is not None
    finally:
        assert server.down(tmp_path)
    assert not server.answers(url)
    assert server.down(tmp_path) is False


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
    assert server._record(tmp_path) is None
    started = psutil.Process().create_time()
    (tmp_path / "work" / "prefect-server.json").write_text(entry.replace("1.0", str(started)))
    assert server._record(tmp_path) is not None


def test_refusals_count_as_answers_and_silence_does_not(prefect_api: str) -> None:
    assert server.answers(prefect_api)
    assert server.answers(f"{prefect_api}/no-such-page")
    assert not server.answers("http://127.0.0.1:1/api")
    assert not server.answers("no url")


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
