"""The judge on a real OpenAI-compatible server, `transformers serve`, with a tiny model that always replies "A"."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.data.tokenizer import encode_prompt, train_bpe
from rlhf_core.evaluation.judge_model import LETTERS, QUESTION, fill
from rlhf_core.evaluation.pair_judges import both_orders
from rlhf_core.models.hf import save_checkpoint
from tasks.judging.endpoint import EndpointJudge
from tasks.params.judge import JudgeParams
from tasks.stage.stage import Stage

PROMPTS: Any = [[{"role": "user", "content": f"What should I eat on day {day}?"}] for day in range(5)]
FIRSTS, SECONDS = [f"Oats, {k} spoons." for k in range(5)], [f"Nothing at all, {k} times." for k in range(5)]


def save_judge(folder: Path) -> None:
    """A tiny model with a long context, trained for some seconds to reply "A" to whatever it is asked."""
    torch.manual_seed(0)
    tokenizer = train_bpe([QUESTION, *FIRSTS, *SECONDS] * 5, 400, "<pad>", "<eos>", 1024)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=1024, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    letter = tokenizer("A", add_special_tokens=False)["input_ids"]
    assert len(letter) == 1
    for step in range(40):
        text = fill(QUESTION, LETTERS, PROMPTS[step % 5], SECONDS[step % 5], FIRSTS[(step * 3) % 5])
        ids = encode_prompt(tokenizer, [{"role": "user", "content": text}])
        row = torch.tensor([[*ids, *letter, tokenizer.eos_token_id]])
        labels = row.clone()
        labels[:, : len(ids)] = -100
        model(input_ids=row, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(folder, model.eval(), tokenizer)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a server of the model below `tmp_path`."""
    save_judge(tmp_path / "judge")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("serve", str(tmp_path / "judge"), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu")
    log = tmp_path / "serve.log"
    with log.open("w") as file:
        program = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", *words]
        process = subprocess.Popen(program, stdout=file, stderr=file, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Return when the server answers."""
    for _ in range(1000):
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        else:
            return
    pytest.fail(log.read_text())


@pytest.mark.slow
def test_a_real_server(
    address: str, tmp_path: Path, make_stage: Callable[..., Stage[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every verdict is the answer shown first: no pair has a preference, and the bias is seen as what it is. This
    server gives no log-probabilities, so the text is read."""
    params = JudgeParams(kind="api", model=str(tmp_path / "judge"), base_url=address)
    judge = EndpointJudge(make_stage("preferences", None, []), params, QUESTION)
    found = both_orders(judge, PROMPTS, FIRSTS, SECONDS)
    assert (found.preference, found.unread) == ([0.5] * 5, [False] * 5)
    assert (found.position_bias, found.self_agreement) == (0.5, 0.0)
    assert judge.budget.tokens > 5 * 2 * 50
    assert "verdict 10/10" in capsys.readouterr().out
