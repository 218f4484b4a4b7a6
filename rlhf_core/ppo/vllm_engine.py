"""The engine `vllm`: a vLLM server on the policy's GPU, which gets the policy's weights in each call and sleeps between
two calls. Not run on a GPU."""

import base64
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.ppo import VLLMConfig
from rlhf_core.determinism import stream
from rlhf_core.models.lora import merged_weights
from rlhf_core.models.sampling import Outcome, Sampled
from rlhf_core.ppo.engines import Key, Prompts, Rules
from rlhf_core.ppo.vllm_server import Server

Handle = dict[str, tuple[Any, ...]]
"""GPU -> how another process of this machine opens the tensor's memory."""
BYTES_AT_ONCE = 2**29
"""Weights of one request, where a layer is not larger."""
LAYER = re.compile(r".*?\.\d+\.")
"""The beginning of the names of a layer's weights."""
NAME = "policy"


def cuda_handle(tensor: Tensor) -> Handle:
    """The handle of a CUDA tensor, as vLLM's backend `ipc` expects it. The tensor must live until it is read."""
    return {str(torch.cuda.get_device_properties(tensor.device).uuid): reduce_tensor(tensor)[1]}  # type: ignore[no-untyped-call]


class VLLMEngine:
    """An engine whose server starts with the first call. Each response has a seed of its own, made from its key, so it
    does not depend on the other rows, except for rounding.

    Args:
        rules: of sampling.
        tokenizer: the server loads it, and does not use it.
        settings: of the server.
        dtype: of the server's weights and products.
        handle: how the server opens the memory of a weight.
    """

    def __init__(
        self,
        rules: Rules,
        tokenizer: PreTrainedTokenizerBase,
        settings: VLLMConfig,
        dtype: torch.dtype,
        handle: Callable[[Tensor], Handle] = cuda_handle,
    ) -> None:
        self.rules, self.tokenizer, self.settings, self.dtype, self.handle = rules, tokenizer, settings, dtype, handle
        self.server: Server | None = None

    def __call__(self, policy: PreTrainedModel, prompts: Prompts, keys: Sequence[Key]) -> Sampled:
        """See `Engine`. Raises UserError where vLLM is missing or does not start, RuntimeError where it fails later;
        then the next call starts another server."""
        if not prompts:
            return Sampled([], [], [])
        if policy.device.type == "cuda":
            torch.cuda.empty_cache()  # the server needs the memory that torch keeps
        try:
            server = self.server or self._start(policy)
            self._send_weights(server, policy)
            requests = [self._request(prompt, key) for prompt, key in zip(prompts, keys, strict=True)]
            answers = server.post_all("/v1/completions", requests, self.rules.rows)
            server.post("/sleep?level=2")
        except BaseException:
            self.close()
            raise
        rows = [self._outcome(answer) for answer in answers]
        return Sampled([r for r, _, _ in rows], [p for _, p, _ in rows], [e for _, _, e in rows])

    def close(self) -> None:
        """End the server."""
        if self.server is not None:
            self.server.end()
            self.server = None

    def _start(self, policy: PreTrainedModel) -> Server:
        """A sleeping server with the policy's architecture and no weights."""
        with TemporaryDirectory(prefix="leash-model-") as folder:
            policy.config.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            self.server = Server(Path(folder), self._arguments(), _visible(policy.device))
        self.server.post("/init_weight_transfer_engine", {"init_info": {"packed": False}})
        self.server.post("/sleep?level=2")
        return self.server

    def _arguments(self) -> list[str]:
        length = self.settings.max_length
        return [
            "--served-model-name", NAME,
            "--load-format", "dummy",
            "--dtype", str(self.dtype).removeprefix("torch."),
            "--weight-transfer-config", '{"backend": "ipc"}',
            "--enable-sleep-mode",
            "--gpu-memory-utilization", str(self.settings.gpu_memory),
            "--max-num-seqs", str(self.rules.rows),
            *(["--max-model-len", str(length)] if length else []),
            "--generation-config", "vllm",  # the folder's changes what is sampled
            "--logprobs-mode", "processed_logprobs",  # at the temperature
            "--no-enable-prefix-caching",  # weights change
            "--disable-uvicorn-access-log",
        ]  # fmt: skip

    def _send_weights(self, server: Server, policy: PreTrainedModel) -> None:
        """Wake the server up with the policy's weights; the cache gets its memory afterwards. Weights that are cast or
        merged live until the end: the server may read a layer when all of it has come."""
        server.post("/wake_up?tags=weights")
        server.post("/start_weight_update", {})
        sent: list[dict[str, Tensor]] = []
        for part in in_parts(merged_weights(policy), self.dtype):
            sent.append(part)
            server.post("/update_weights", {"update_info": self._update_info(part)})
        server.post("/finish_weight_update", {})
        del sent, part
        if policy.device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # the server takes memory from the driver
        server.post("/wake_up?tags=kv_cache")

    def _update_info(self, part: dict[str, Tensor]) -> dict[str, Any]:
        handles = [self.handle(tensor) for tensor in part.values()]
        if any(tensor.is_cuda for tensor in part.values()):
            torch.cuda.synchronize()  # the server reads on a stream of its own
        return {
            "names": list(part),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in part.values()],
            "shapes": [list(tensor.shape) for tensor in part.values()],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }

    def _request(self, prompt: Sequence[int], key: Key) -> dict[str, Any]:
        """Token ids in and out, and exactly softmax(logits / temperature)."""
        rules = self.rules
        return {
            "model": NAME,
            "prompt": list(prompt),
            "seed": int(stream(*key).integers(2**63)),
            "temperature": rules.temperature,
            "max_tokens": rules.max_new_tokens,
            "stop_token_ids": sorted(rules.stop_ids),
            "ignore_eos": True,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 1,
            "return_token_ids": True,
            "add_special_tokens": False,
            "skip_special_tokens": False,
        }

    def _outcome(self, answer: dict[str, Any]) -> Outcome:
        """Raises RuntimeError for a response that is not what was requested."""
        choice = answer["choices"][0]
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        stops = [place for place, token in enumerate(tokens) if token in self.rules.stop_ids]
        ended = stops == [len(tokens) - 1]
        if len(tokens) != len(logprobs) or not (ended or (not stops and len(tokens) == self.rules.max_new_tokens)):
            raise RuntimeError(
                f"vLLM returned {len(tokens)} tokens, {len(logprobs)} log-probabilities and finish_reason "
                f"{choice['finish_reason']!r}: neither a stop token at the end nor ppo.max_new_tokens"
            )
        return tokens, logprobs, ended


def in_parts(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, most_bytes: int = BYTES_AT_ONCE
) -> Iterator[dict[str, Tensor]]:
    """The weights by name, contiguous and in one precision, in parts of `most_bytes` bytes or one layer."""
    part: dict[str, Tensor] = {}
    for _, layer in groupby(weights, lambda pair: layer_of(pair[0])):
        tensors = {name: weight.detach().to(dtype).contiguous() for name, weight in layer}
        if part and _bytes(part) + _bytes(tensors) > most_bytes:
            yield part
            part = {}
        part |= tensors
    if part:
        yield part


def layer_of(name: str) -> str:
    """What a weight's name has in common with the others of its layer; outside of layers the name itself."""
    found = LAYER.match(name)
    return found[0] if found else name


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _visible(device: torch.device) -> str | None:
    """The GPU as in CUDA_VISIBLE_DEVICES of the server; None on a CPU."""
    if device.type != "cuda":
        return None
    listed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    place = device.index if device.index is not None else torch.cuda.current_device()
    return listed[place] if listed else str(place)
