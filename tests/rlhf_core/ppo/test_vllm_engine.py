"""The engine `vllm` against `fake_vllm.py`: its process, its weights and its errors. The real server has never been
run here. Tests of what all engines have in common: test_engines.py."""

import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import rlhf_core
from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.ppo import PPOConfig, VLLMConfig
from rlhf_core.errors import UserError
from rlhf_core.models.lora import add_lora, merged_weights
from rlhf_core.ppo.engines import Rules, engine_of
from rlhf_core.ppo.vllm_engine import Handle, VLLMEngine, in_parts
from rlhf_core.ppo.vllm_server import PROGRAM

Build = Callable[..., PreTrainedModel]
Engines = Callable[[Rules], VLLMEngine]
PROMPTS = [[3, 7 + i, *range(20, 20 + i), 4] for i in range(6)]
KEYS = [(1, 0, i) for i in range(len(PROMPTS))]
RULES = Rules(max_new_tokens=6, temperature=0.8, stop_ids=frozenset({1, 17, 30}), pad_id=0, rows=4)


# weights


def test_each_part_has_the_given_size_at_most_or_is_one_weight() -> None:
    weights = [(name, torch.full((size,), float(size))) for name, size in zip("abcde", (2, 3, 4, 9, 1), strict=True)]
    parts = [
        {name: len(tensor) for name, tensor in part.items()}
        for part in in_parts(weights, torch.bfloat16, most_bytes=10)
    ]
    assert parts == [{"a": 2, "b": 3}, {"c": 4}, {"d": 9}, {"e": 1}]
    assert next(in_parts(weights, torch.bfloat16))["a"].dtype == torch.bfloat16


def test_a_layer_is_in_one_part() -> None:
    names = ["embed.weight", "layers.0.q.weight", "layers.0.mlp.1.weight", "layers.1.q.weight", "norm.weight"]
    weights = [(name, torch.zeros(4)) for name in names]
    parts = [list(part) for part in in_parts(weights, torch.bfloat16, most_bytes=18)]
    assert parts == [names[:1], names[1:3], names[3:]]


def test_sent_weights_live_until_the_server_has_finished(build_lm: Build) -> None:
    """It opens their memory. Those that are cast would be gone after the request."""
    alive: list[weakref.ref[torch.Tensor]] = []
    paths: list[str] = []

    def handle(tensor: torch.Tensor) -> Handle:
        alive.append(weakref.ref(tensor))
        return {"cpu": ()}

    class Sent:
        def post(self, path: str, body: object = None) -> None:
            paths.append(path)
            assert path == "/wake_up?tags=kv_cache" or all(ref() is not None for ref in alive)

    engine = VLLMEngine(RULES, cast(Any, None), VLLMConfig(), torch.bfloat16, handle)
    engine._send_weights(cast(Any, Sent()), build_lm())
    assert len(alive) > 3
    assert paths[-2:] == ["/finish_weight_update", "/wake_up?tags=kv_cache"]
    assert all(ref() is None for ref in alive)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]])
def test_merged_weights_are_those_of_the_merged_model(build_lm: Build, targets: Any) -> None:
    """By name and value, and the model keeps its adapters."""
    model = build_lm()
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in merged_weights(model)] == names
    adapter = add_lora(model, LoraSettings(rank=2, target_modules=targets), seed=1)
    with torch.no_grad():
        for tensor in adapter.state_dict().values():
            tensor.normal_()
    found = dict(merged_weights(model))
    plain = dict(adapter.merge().named_parameters())
    assert list(found) == names == list(plain)
    assert all((found[name] - plain[name]).abs().max() <= 1e-6 for name in names)


@pytest.mark.slow
def test_the_server_follows_the_weights_of_each_call(build_lm: Build, vllm_engine: Engines) -> None:
    """With adapters, too: log-probabilities are those of the policy now, and the policy does not change."""
    model, engine = build_lm(), vllm_engine(RULES)
    before = engine(model, PROMPTS, KEYS)
    server = engine.server
    assert engine(model, PROMPTS, KEYS) == before
    adapter = add_lora(model, LoraSettings(rank=2), seed=1)
    with torch.no_grad():
        for tensor in adapter.state_dict().values():
            tensor.normal_(std=0.2)
    after = engine(model, PROMPTS, KEYS)
    assert engine.server is server
    assert after != before
    adapter.merge()
    assert engine(model, PROMPTS, KEYS).responses == after.responses


# process


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 30
    while any(map(is_running, pids)):
        assert time.monotonic() < until, f"{pids} are still there"
        time.sleep(0.1)


def pids_of(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text(encoding="utf-8").split()]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "deaf"])
def test_the_server_ends_with_everything_it_started(
    fault: str,
    build_lm: Build,
    fake_vllm: Path,
    tokenizer: PreTrainedTokenizerBase,
    file_handle: Callable[[torch.Tensor], Handle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the engine; its helper takes no SIGTERM, and with `deaf` the server neither."""
    monkeypatch.setenv("FAKE_VLLM_FAULT", fault)
    engine = VLLMEngine(RULES, tokenizer, VLLMConfig(), torch.float32, file_handle)
    engine(build_lm(), PROMPTS[:1], KEYS[:1])
    folder = engine.server.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    pids = [engine.server.process.pid, *pids_of(fake_vllm)]
    assert all(map(is_running, pids))
    del engine
    wait_until_gone(pids)
    assert not folder.exists()


STARTER = """
import sys, time
from pathlib import Path
from rlhf_core.ppo.vllm_server import Server
arguments = sys.argv[2:]
server = Server(Path(sys.argv[1]), arguments)
print("ready", server.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_stage_leaves_no_server(
    build_lm: Build, fake_vllm: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    build_lm().config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    arguments = VLLMEngine(RULES, tokenizer, VLLMConfig(), torch.float32)._arguments()
    command = [sys.executable, "-c", STARTER, str(tmp_path), *arguments]
    stage = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert stage.stdout is not None
    keeper = int(stage.stdout.readline().split()[1])
    pids = [keeper, *pids_of(fake_vllm)]
    assert all(map(is_running, pids))
    os.kill(stage.pid, signal.SIGKILL)
    stage.wait()
    stage.stdout.close()
    wait_until_gone(pids)


# errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("no start", UserError, "the server ended while it started; its last line: no memory for the cache"),
        ("old", UserError, r"vLLM 0.1 has no /start_weight_update; install vllm>="),
        ("dies", RuntimeError, r"gave no answer to /v1/completions.*its last line: out of shared memory"),
        ("short", RuntimeError, "neither a stop token at the end nor ppo.max_new_tokens"),
    ],
)
def test_a_server_with_a_fault_is_an_error_in_one_line(
    fault: str,
    error: type[Exception],
    message: str,
    build_lm: Build,
    fake_vllm: Path,
    tokenizer: PreTrainedTokenizerBase,
    file_handle: Callable[[torch.Tensor], Handle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_VLLM_FAULT", fault)
    (fake_vllm / "pids").unlink(missing_ok=True)
    engine = VLLMEngine(RULES, tokenizer, VLLMConfig(), torch.float32, file_handle)
    with pytest.raises(error, match=message) as raised:
        engine(build_lm(), PROMPTS, KEYS)
    assert "\n" not in str(raised.value)
    engine.close()
    if (fake_vllm / "pids").exists():
        wait_until_gone(pids_of(fake_vllm))


def test_without_vllm_or_without_a_gpu_the_settings_are_refused_in_one_line(
    ppo_values: Callable[..., dict[str, Any]], tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PPOConfig(**ppo_values(engine="vllm", vllm={"gpu_memory": 0.3, "max_length": 99}))
    with pytest.raises(UserError, match=r"ppo\.engine: vllm needs a CUDA device"):
        engine_of(config, tokenizer, RULES.stop_ids)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(PROGRAM, "/nowhere/vllm")
    with pytest.raises(UserError, match=r"LEASH_VLLM=/nowhere/vllm is not a program; install it .* 'vllm>="):
        engine_of(config, tokenizer, RULES.stop_ids)
    monkeypatch.delenv(PROGRAM)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="the program vllm is not installed") as refused:
        engine_of(config, tokenizer, RULES.stop_ids)
    assert "\n" not in str(refused.value)
    monkeypatch.setenv(PROGRAM, sys.executable)
    engine = engine_of(config, tokenizer, RULES.stop_ids, "bfloat16")
    assert isinstance(engine, VLLMEngine)
    assert engine.dtype == torch.bfloat16
    arguments = " ".join(engine._arguments())
    assert "--dtype bfloat16" in arguments
    assert "--gpu-memory-utilization 0.3" in arguments
    assert "--max-model-len 99" in arguments


def test_vllm_is_never_imported() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in Path(rlhf_core.__file__).parent.rglob("*.py")}
    assert len(sources) > 50
    assert not [path for path, text in sources.items() if re.search(r"^\s*(import|from)\s+vllm\b", text, re.MULTILINE)]
