"""`leash chat`: what a pipe and a terminal get, and what is refused in one line."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import flows
from flows.cli import app
from flows.commands import chat
from rlhf_core.config.base import ScratchConfig
from rlhf_core.data.tokenizer import decode_response, encode_prompt, train_bpe
from rlhf_core.inspect.dialogue import load_chat_model
from rlhf_core.models.hf import build_llama, save_checkpoint

Leash = Callable[..., Result]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/{sft,policy}, with random weights."""
    folder = tmp_path_factory.mktemp("project") / "models"
    tokenizer = train_bpe(["what shall i eat? an egg."], 300, "<|pad|>", "<|end|>", 64)
    config = ScratchConfig(vocabulary=300, context=64, layers=1, hidden=16, intermediate=16, heads=2)
    for seed, name in enumerate(("sft", "policy")):
        save_checkpoint(folder / name, build_llama(config, tokenizer, seed), tokenizer)
    return folder


@pytest.fixture
def leash(models: Path, monkeypatch: pytest.MonkeyPatch) -> Leash:
    """leash("hello", "models/policy", …) -> what `leash chat` makes of one message a line."""
    monkeypatch.chdir(models.parent)

    def run(messages: str | bytes, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["chat", *arguments], input=messages)

    return run


def test_a_pipe_gets_answers_and_nothing_else(leash: Leash) -> None:
    """The same ones each time, others for another seed, and one that ends in time."""
    messages = "what shall i eat?\n\nan egg?\n"
    found = leash(messages, "models/policy", "--max-new-tokens", "5")
    assert (found.exit_code, found.stderr) == (0, "")
    assert leash(messages, "models/policy", "--max-new-tokens", "5").stdout == found.stdout
    assert leash(messages, "models/policy", "--max-new-tokens", "5", "--seed", "2").stdout != found.stdout
    assert len(leash(messages, "models/policy", "--max-new-tokens", "40").stdout) > len(found.stdout)


def test_temperature_0_is_the_likeliest_token(leash: Leash, models: Path) -> None:
    """The seed changes nothing, and each token has the largest logit."""
    options = ("models/policy", "--temperature", "0", "--max-new-tokens", "8")
    found = leash("egg\n", *options, "--seed", "1")
    assert (found.exit_code, found.stdout) == (0, leash("egg\n", *options, "--seed", "2").stdout)
    chat_model = load_chat_model(models / "policy", "policy")
    chat_model.add_message("egg", 8)
    ids = encode_prompt(chat_model.tokenizer, chat_model.conversation)
    answer = list[int]()
    while len(answer) < 8 and not chat_model.stop_ids & set(answer):
        with torch.no_grad():
            logits = chat_model.model(input_ids=torch.tensor([ids + answer])).logits
        answer.append(int(logits[0, -1].argmax()))
    assert found.stdout.strip() == decode_response(chat_model.tokenizer, answer, chat_model.stop_ids).strip()


def test_two_models_are_printed_below_each_other_with_their_names(leash: Leash) -> None:
    found = leash("eat?\n", "models/policy", "--beside", "models/sft", "--max-new-tokens", "4")
    heads = [line.split("|")[0] for line in found.stdout.splitlines() if not line.startswith("  ")]
    assert heads == ["models/policy ", "models/sft    "]
    alone = [leash("eat?\n", f"models/{name}", "--max-new-tokens", "4").stdout for name in ("policy", "sft")]
    for line, answer in zip(found.stdout.split("models/sft    | "), alone, strict=True):
        assert line.removeprefix("models/policy | ").replace("\n              | ", "\n") == answer


def test_known_and_unknown_commands(leash: Leash) -> None:
    """After a reset the conversation is empty. Nothing is read after /quit."""
    found = leash("/help\n/reset\n/quit\neat?\n", "models/policy")
    assert (found.exit_code, found.stdout) == (0, "")
    assert "/help is not a command" in found.stderr
    assert "the conversation is forgotten" in found.stderr


def test_a_reset_clears_the_conversation_and_a_full_context_is_reported(
    leash: Leash, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    real = chat.ChatModel.answer

    def watched(model: chat.ChatModel, *arguments: object) -> object:
        seen.append([message["content"] for message in model.conversation if message["role"] != "assistant"])
        return real(model, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(chat.ChatModel, "answer", watched)
    found = leash("one\ntwo\n/reset\nthree\n", "models/policy", "--max-new-tokens", "2", "--system", "eat")
    assert seen == [["eat", "one"], ["eat", "one", "two"], ["eat", "three"]]
    assert "tokens is full" not in found.stderr
    seen.clear()
    leash("one\ntwo\n", "models/policy", "--max-new-tokens", "2", "--system", "eat", "--fresh")
    assert seen == [["eat", "one"], ["eat", "two"]]
    found = leash("what shall i eat? an egg.\n" * 4, "models/policy", "--max-new-tokens", "30")
    assert "models/policy: its context of 64 tokens is full; the oldest 2 messages go" in found.stderr


def test_a_message_that_does_not_fit_is_answered_by_a_note(leash: Leash) -> None:
    found = leash(f"{'xyz' * 60}\neat?\n", "models/policy", "--max-new-tokens", "3")
    assert found.exit_code == 0
    assert "the model reads 64; shorten it" in found.stderr
    assert found.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["models/nowhere"], "models/nowhere: no such folder"),
        (["models"], "models: holds no model"),
        (["models/policy", "--beside", "models/rloo"], "models/rloo: no such folder"),
        (["models/policy", "--temperature", "-1"], "--temperature -1: give 0"),
        (["models/policy", "--temperature", "nan"], "--temperature nan: give 0"),
    ],
)
def test_users_errors_are_one_line(
    leash: Leash, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And come before a model is loaded."""
    monkeypatch.setattr(chat, "load_chat_model", lambda *_, **__: pytest.fail("a model was loaded"))
    found = leash("", *arguments)
    assert found.exit_code == 2
    assert found.stderr.startswith(f"error: {words}")
    assert found.stderr.count("\n") == 1


def test_bytes_that_are_not_text(leash: Leash) -> None:
    found = leash(b"eat?\n\xff\n", "models/policy", "--max-new-tokens", "1")
    assert found.exit_code == 2
    assert "standard input, line 2: not UTF-8" in found.stderr


def test_code_of_a_model_runs_only_in_a_project_that_trusts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a folder elsewhere, nor for a folder inside another project."""
    for name, text in (("mine", "trust_remote_code: true\n"), ("theirs", "trust_remote_code: true\n")):
        (tmp_path / name / "models").mkdir(parents=True)
        (tmp_path / name / "dvc.yaml").write_text("stages: {}\n")
        (tmp_path / name / "params.yaml").write_text(text)
    warnings: list[str] = []
    monkeypatch.setattr(chat, "warn_of_code", warnings.append)
    monkeypatch.chdir(tmp_path)
    assert chat.project_settings(tmp_path / "mine" / "models") == (False, "float32")
    monkeypatch.chdir(tmp_path / "mine")
    assert chat.project_settings(Path("models")) == (True, "float32")
    assert chat.project_settings(tmp_path / "theirs" / "models") == (False, "float32")
    assert warnings == ["chat:"]
    Path("params.yaml").write_text("trust_remote_code: false\n")
    assert chat.project_settings(Path("models")) == (False, "float32")


def test_a_model_is_loaded_in_the_precision_of_its_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dvc.yaml").write_text("stages: {}\n")
        (tmp_path / name / "params.yaml").write_text("precision: bfloat16\n")
    monkeypatch.chdir(tmp_path / "mine")
    assert chat.project_settings(Path("models")) == (False, "bfloat16")
    assert chat.project_settings(tmp_path / "theirs" / "models") == (False, "float32")
    Path("params.yaml").write_text("seed: 1\n")
    assert chat.project_settings(Path("models")) == (False, "float32")


@pytest.mark.slow
def test_a_terminal_has_a_prompt_and_ctrl_d_leaves(models: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(Path(flows.__file__).parent.parent), "TERM": "dumb"}
    command = [sys.executable, "-m", "flows.cli", "chat", "models/policy", "--max-new-tokens", "3"]
    process = subprocess.Popen(command, cwd=models.parent, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""

    def until(words: bytes) -> None:
        nonlocal seen
        end = time.monotonic() + 100
        while words not in seen and time.monotonic() < end:
            seen += os.read(ours, 4096)

    until(b"\n> ")
    assert b"Ctrl-D leaves" in seen
    seen = b""
    os.write(ours, b"eat?\n")
    until(b"\n> ")
    os.write(ours, b"\x04")
    assert process.wait(timeout=60) == 0
    os.close(ours)


def test_an_interpolation_answers_as_its_ends_and_otherwise_in_between(leash: Leash) -> None:
    def answer(*options: str) -> str:
        return leash("eat?\n", *options, "--max-new-tokens", "6").stdout

    assert answer("models/policy", "--eta", "1") == answer("models/policy")
    assert answer("models/policy", "--eta", "0") == answer("models/sft")
    assert answer("models/sft", "--eta", "0", "--start", "models/policy") == answer("models/policy")
    found = leash("eat?\n", "models/policy", "--eta", "0.5", "--beside", "models/sft", "--max-new-tokens", "4")
    assert found.stdout.startswith("models/policy at eta 0.5 | ")


def test_interpolations_that_cannot_be_made_are_refused_in_one_line(leash: Leash, models: Path) -> None:
    tokenizer = train_bpe(["what shall i eat? an egg."], 300, "<|pad|>", "<|end|>", 64)
    config = ScratchConfig(vocabulary=300, context=64, layers=1, hidden=16, intermediate=32, heads=2)
    save_checkpoint(models / "wider", build_llama(config, tokenizer, 1), tokenizer)
    for options, said in (
        (("--eta", "1.5"), "--eta 1.5: give a number from 0"),
        (("--eta", "0.5", "--start", "models/missing"), "models/missing: no such folder"),
        (("--eta", "0.5", "--start", "models/wider"), "both must be of one architecture"),
    ):
        found = leash("eat?\n", "models/policy", *options)
        assert (found.exit_code, said in found.stderr) == (2, True), found.stderr
        assert len(found.stderr.strip().splitlines()) == 1
