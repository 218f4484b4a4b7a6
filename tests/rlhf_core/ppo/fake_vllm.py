"""`serve`s a model of transformers through the endpoints of a vLLM server that `vllm_engine.py` uses: real tokens and
log-probabilities, and no answer where the real server would give none (asleep, or without weights). Run as a program;
with FAKE_VLLM_FAULT it has one of the faults below."""

import argparse
import base64
import json
import os
import pickle
import signal
import socketserver
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FAULT = os.environ.get("FAKE_VLLM_FAULT", "")


class Served:
    """The model, what memory of the server is awake, and the weights that a running update has received."""

    def __init__(self, folder: str, dtype: str) -> None:
        config = AutoConfig.from_pretrained(folder)
        AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        self.awake = {"weights", "kv_cache"}
        self.loaded, self.initialised = False, False
        self.received: set[str] | None = None
        self.lock = threading.Lock()

    def post(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            return getattr(self, path.strip("/").replace("/", "_"))(query, body)

    def sleep(self, query: dict[str, list[str]], _: dict[str, Any]) -> dict[str, Any]:
        assert query["level"] == ["2"]
        self.awake, self.loaded = set(), False
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))
        return {}

    def wake_up(self, query: dict[str, list[str]], _: dict[str, Any]) -> dict[str, Any]:
        self.awake |= set(query["tags"])
        return {}

    def init_weight_transfer_engine(self, _: dict[str, list[str]], body: dict[str, Any]) -> dict[str, Any]:
        assert body["init_info"] == {"packed": False}
        self.initialised = True
        return {}

    def start_weight_update(self, *_: Any) -> dict[str, Any]:
        assert self.initialised
        assert self.received is None
        assert self.awake == {"weights"}, "the cache and the old weights would be in memory beside the new ones"
        self.received = set()
        return {}

    @torch.no_grad()
    def update_weights(self, _: dict[str, list[str]], body: dict[str, Any]) -> dict[str, Any]:
        info = body["update_info"]
        assert os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
        parameters = dict(self.model.named_parameters())
        for name, dtype, shape, handle in zip(info["names"], info["dtype_names"], info["shapes"], handles, strict=True):
            (file,) = handle["cpu"]
            tensor = torch.from_file(file, size=parameters[name].numel(), dtype=getattr(torch, dtype)).view(shape)
            parameters[name].copy_(tensor)
            self.received.add(name)
        return {}

    def finish_weight_update(self, *_: Any) -> dict[str, Any]:
        assert self.received == {name for name, _ in self.model.named_parameters()}
        self.received, self.loaded = None, True
        return {}

    @torch.no_grad()
    def v1_completions(self, _: dict[str, list[str]], body: dict[str, Any]) -> dict[str, Any]:
        """As vLLM draws: argmax of p / q, q exponential, from a generator of the request."""
        assert self.loaded
        assert self.awake == {"weights", "kv_cache"}
        assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
        assert body["ignore_eos"]
        assert body["return_token_ids"]
        generator = torch.Generator().manual_seed(body["seed"])
        tokens, logprobs, reason = [], [], "length"
        cut = body["max_tokens"] - (FAULT == "short")
        while len(tokens) < cut and reason == "length":
            logits = self.model(torch.tensor([body["prompt"] + tokens])).logits[0, -1].float()
            scores = (logits / body["temperature"]).log_softmax(-1)
            noise = torch.empty_like(scores).exponential_(generator=generator)
            token = int((scores.exp() / noise).argmax())
            tokens.append(token)
            logprobs.append(float(scores[token]))
            reason = "stop" if token in body["stop_token_ids"] else "length"
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
        return {"choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    served: Served

    def address_string(self) -> str:
        return "socket"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        known = {name.replace("v1_", "v1/") for name in vars(Served) if not name.startswith("_") and name != "post"}
        if FAULT == "old":
            known -= {"start_weight_update"}
        paths = {f"/{name}": {} for name in known}
        self.answer(200, {"/openapi.json": {"paths": paths}, "/version": {"version": "0.1"}}.get(self.path, {}))

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size) or b"{}")
        url = urlsplit(self.path)
        if FAULT == "dies" and url.path == "/v1/completions":
            print("out of shared memory", flush=True)
            os._exit(3)
        try:
            self.answer(200, self.served.post(url.path, parse_qs(url.query), body))
        except Exception as error:
            self.answer(500, {"error": {"message": f"{type(error).__name__}: {error}"}})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("serve", choices=["serve"])
    parser.add_argument("model")
    for name in ("uds", "served-model-name", "load-format", "dtype", "weight-transfer-config"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("gpu-memory-utilization", "max-num-seqs", "generation-config", "logprobs-mode"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--max-model-len")
    for name in ("enable-sleep-mode", "no-enable-prefix-caching", "disable-uvicorn-access-log"):
        parser.add_argument(f"--{name}", action="store_true", required=True)
    options = parser.parse_args()
    assert json.loads(options.weight_transfer_config) == {"backend": "ipc"}
    assert (options.load_format, options.generation_config) == ("dummy", "vllm")
    assert options.logprobs_mode == "processed_logprobs"
    if FAULT == "no start":
        sys.exit("no memory for the cache")
    torch.set_num_threads(1)
    helper = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); "
                               "time.sleep(600)"])  # fmt: skip
    Path(os.environ["FAKE_VLLM_PIDS"]).write_text(f"{os.getpid()} {helper.pid}", encoding="utf-8")
    if FAULT == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Handler.served = Served(options.model, options.dtype)
    with Server(options.uds, Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
