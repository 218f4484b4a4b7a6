"""Fixtures for tests of the engine `vllm`, whose server is `fake_vllm.py` here."""

import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.ppo import VLLMConfig
from rlhf_core.ppo.engines import Rules
from rlhf_core.ppo.vllm_engine import Handle, VLLMEngine
from rlhf_core.ppo.vllm_server import PROGRAM, Server

FAKE = Path(__file__).with_name("fake_vllm.py")


@pytest.fixture(scope="session")
def file_handle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.Tensor], Handle]:
    """Hands a tensor over in a file: on a CPU there are no handles of CUDA memory."""
    folder, number = tmp_path_factory.mktemp("weights"), count()

    def handle(tensor: torch.Tensor) -> Handle:
        path = folder / str(next(number))
        path.write_bytes(tensor.view(torch.uint8).numpy().tobytes())
        return {"cpu": (str(path),)}

    return handle


@pytest.fixture(scope="session")
def fake_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with the program, and with the file `pids` of the last server. LEASH_VLLM names the program."""
    folder = tmp_path_factory.mktemp("vllm")
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PROGRAM, str(program))
        patch.setenv("FAKE_VLLM_PIDS", str(folder / "pids"))
        yield folder


@pytest.fixture(scope="session")
def vllm_engine(
    fake_vllm: Path, file_handle: Callable[[torch.Tensor], Handle], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Callable[[Rules], VLLMEngine]]:
    """vllm_engine(rules) -> an engine; engines for models of one architecture share a server."""
    servers: dict[str, Server] = {}

    class Shared(VLLMEngine):
        def _start(self, policy: PreTrainedModel) -> Server:
            kind = policy.config.to_json_string()
            if kind not in servers:
                servers[kind] = super()._start(policy)
            self.server = servers[kind]
            return self.server

    def make(rules: Rules, **settings: Any) -> VLLMEngine:
        return Shared(rules, tokenizer, VLLMConfig(**settings), torch.float32, file_handle)

    yield make
    for server in servers.values():
        server.end()
