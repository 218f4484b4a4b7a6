"""`leash up` installs automations: each once, and the one that posts events to an address."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import flows
from flows.server import _free_port
from tests.faults.conftest import until

EMIT = """
from prefect.events import emit_event
emit_event("leash.kept", resource={"prefect.resource.id": "leash.policy.2"}, payload={"decision": 'kept: "version 1"'})
emit_event("leash.alert.kl_spike", resource={"prefect.resource.id": "leash.policy.2"}, payload={"alert": "kl_spike"})
emit_event("leash.new-data", resource={"prefect.resource.id": "leash.data.main"})
"""
COUNT = """
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    found = client._client.post("/automations/filter").json()
print(*sorted(one["name"] for one in found if one["name"].startswith("leash")), sep="\\n")
"""


@pytest.fixture
def posted() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and the bodies that were posted to it."""
    bodies: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", bodies
    server.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_events_are_posted_and_automations_are_there_once(
    toy: Callable[..., Path], leash: Callable[..., "subprocess.Popen[str]"], posted: tuple[str, list[str]]
) -> None:
    address, bodies = posted
    root = toy({"one": ("work", [])})
    port = _free_port()
    environment = os.environ | {
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "PYTHONPATH": str(Path(flows.__file__).parents[1]),
    }  # fmt: skip

    def python(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout

    try:
        for _ in range(2):
            process = leash(root, "up", "--port", str(port), "--notify", address)
            _, errors = process.communicate(timeout=150)
            assert process.returncode == 0, errors
        names = python(COUNT).splitlines()
        assert names == ["leash: a run without heartbeats is marked Crashed", "leash: post alerts and decisions"]
        python(EMIT)
        until(lambda: len(bodies) == 2)
    finally:
        leash(root, "up", "--stop").communicate(timeout=60)
    texts = sorted(json.loads(body)["text"] for body in bodies)
    assert texts == ["leash.alert.kl_spike: kl_spike", 'leash.kept: kept: "version 1"']


def test_what_is_no_address(toy: Callable[..., Path]) -> None:
    from flows.automations import post_to
    from rlhf_core.errors import UserError

    with pytest.raises(UserError, match="--notify nowhere: not an address"):
        post_to("nowhere")
