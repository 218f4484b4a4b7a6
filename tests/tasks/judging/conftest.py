"""A real HTTP server that answers as an OpenAI-compatible endpoint, or fails."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Reply = tuple[int, Any]
"""A status, and a body: a dictionary becomes JSON, bytes are sent as they are, None closes the connection."""


def completion(text: str | None, logprobs: dict[str, float] | None = None, tokens: int = 50) -> Reply:
    """A chat completion; `logprobs` are those of the first token."""
    choice: dict[str, Any] = {
        "index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}, "logprobs": None,
    }  # fmt: skip
    if logprobs is not None:
        top = [{"token": token, "logprob": value, "bytes": None} for token, value in logprobs.items()]
        choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}], "refusal": None}
    usage = {"prompt_tokens": tokens - 1, "completion_tokens": 1, "total_tokens": tokens}
    return 200, {
        "id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage,
    }  # fmt: skip


def prefers_good(body: dict[str, Any]) -> Reply:
    """The verdict of a judge that sees which answer is the good one."""
    text = body["messages"][0]["content"]
    return completion("A" if text.index("good") < text.index("bad") else "B")


@dataclass
class Server:
    """An endpoint whose answers are a function of the request."""

    answer: Callable[[dict[str, Any]], Reply] = prefers_good
    failures: list[Reply] = field(default_factory=list)
    """Sent first, one for each request."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""

    completion = staticmethod(completion)
    prefers_good = staticmethod(prefers_good)

    def questions(self) -> Counter[str]:
        """How often each question was received."""
        return Counter(body["messages"][0]["content"] for body in self.bodies)


@pytest.fixture
def server() -> Iterator[Server]:
    """A real HTTP server on a free port."""
    state, lock, at_work = Server(), threading.Lock(), 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal at_work
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                at_work += 1
                state.most_at_once = max(state.most_at_once, at_work)
                state.bodies.append(body)
                state.keys.append(self.headers["Authorization"])
                state.headers.append(str(self.headers))
                reply = state.failures.pop(0) if state.failures else None
            try:
                self._send(*(reply or state.answer(body)))
            finally:
                with lock:
                    at_work -= 1

        def _send(self, status: int, body: Any) -> None:
            if body is None:
                self.connection.close()
                return
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if isinstance(body, bytes) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Retry-After-Ms", "20")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (ConnectionError, ValueError):  # closed on purpose
                self.close_connection = True

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{http.server_port}/v1"
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield state
    http.shutdown()
    http.server_close()
    thread.join()
