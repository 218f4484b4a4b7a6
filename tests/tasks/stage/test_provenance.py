"""The provenance of a model: what a model was made from, with the same bytes wherever and whenever the stage runs."""

import hashlib
import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_core.config.block import Block
from rlhf_core.errors import UserError
from tasks.records.recorded import recorded
from tasks.stage.provenance import path_of, read, render, without_secrets
from tasks.stage.run import run
from tasks.stage.stage import Stage
from tasks.stage.versions import declared

if TYPE_CHECKING:
    from tests.conftest import Ended, TinyRun

GRAPH = """
stages:
  toy:
    cmd: python -m tasks toy
    deps: [input.txt, folder, tasks/toy.py]
    params: [toy, seed]
    outs: [models/toy, models/toy.provenance.json, models/other, models/other.provenance.json, page, out.txt]
"""
PARAMS = "threads: 1\nseed: 7\nlong_rows: refuse\nruntime: {tracking: false}\ntoy: {word: hello, api_key: hunter2}\n"
MODELS = ["base", "sft", "reward", "policy", "critic", "snapshots", "rejection_sft", "dpo", "rloo"]


class Toy(Block):
    """The parameters of the toy stage."""

    word: str
    api_key: str


def md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


def write_all(stage: Stage[Toy]) -> None:
    for folder in ("models/toy", "models/other", "page"):
        stage.out(folder).mkdir()
        (stage.out(folder) / "weights").write_text(stage.params.word, encoding="utf-8")
    stage.out("out.txt").write_text("out", encoding="utf-8")


@pytest.fixture
def run_toy(
    tmp_path: Path, in_process: "Callable[[Path, Callable[[], object]], Ended]"
) -> Callable[..., "tuple[Path, Ended]"]:
    def call(name: str = "here", execute: Callable[[Stage[Toy]], None] = write_all) -> "tuple[Path, Ended]":
        root = tmp_path / name
        files = {".dvc/config": "[core]\n    no_scm = true\n", "dvc.yaml": GRAPH, "params.yaml": PARAMS}
        files |= {"input.txt": "1\n", "folder/a": "a\n", "tasks/toy.py": "pass\n"}
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        return root, in_process(root, lambda: run("toy", Toy, lambda: execute))

    return call


def test_its_content(run_toy: Callable[..., "tuple[Path, Ended]"]) -> None:
    root, ended = run_toy()
    assert (ended.code, ended.stderr) == (0, "")
    listing = json.dumps([{"md5": md5("a\n"), "relpath": "a"}])
    assert json.loads(path_of(root / "models/toy").read_text(encoding="utf-8")) == {
        "stage": "toy",
        "command": "python -m tasks toy",
        "params": {"seed": 7, "toy": {"word": "hello", "api_key": "(hidden)"}},
        "inputs": {"input.txt": md5("1\n"), "folder": md5(listing) + ".dir"},
        "code": {"tasks/toy.py": md5("pass\n")},
        "versions": declared(),
        "exemptions": [],
    }
    assert path_of(root / "models/other").read_bytes() == path_of(root / "models/toy").read_bytes()
    assert [path.name for path in (root / "models/toy").iterdir()] == ["weights"], "the model's hash is of the model"


def test_the_same_bytes_elsewhere_and_at_another_time(
    run_toy: Callable[..., "tuple[Path, Ended]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = run_toy("here")
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    monkeypatch.setenv("USER", "somebody")
    second, _ = run_toy("a place/elsewhere")
    text = path_of(first / "models/toy").read_text(encoding="utf-8")
    assert path_of(second / "models/toy").read_text(encoding="utf-8") == text
    for secret in (str(first), socket.gethostname(), "hunter2", str(os.getpid())):
        assert secret not in text
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"


def test_it_has_the_reason_why_a_run_is_exempt_from_byte_identity(run_toy: Callable[..., "tuple[Path, Ended]"]) -> None:
    def execute(stage: Stage[Toy]) -> None:
        stage.exemptions.append("the micro-batch was halved")
        write_all(stage)

    root, _ = run_toy(execute=execute)
    assert json.loads(path_of(root / "models/toy").read_text())["exemptions"] == ["the micro-batch was halved"]


def test_a_model_that_was_not_written_is_still_missed(run_toy: Callable[..., "tuple[Path, Ended]"]) -> None:
    def execute(stage: Stage[Toy]) -> None:
        stage.out("models/toy").mkdir()

    root, ended = run_toy(execute=execute)
    assert ended.code == 1
    assert "ended without writing models/other, page, out.txt" in ended.stderr
    assert not (root / "models").exists() or not list((root / "models").iterdir())


def test_an_infinity_does_not_lose_a_finished_training() -> None:
    assert render(without_secrets({"max_grad_norm": math.inf})) == '{\n  "max_grad_norm": "inf"\n}\n'


def test_only_what_is_named_like_a_secret_is_hidden() -> None:
    params = {"base": {"pad_token": "<|pad|>", "hub": {"token": "t"}}, "url": "https://me:pw@host/x", "list": ["a"]}
    assert without_secrets(params) == {
        "base": {"pad_token": "<|pad|>", "hub": {"token": "(hidden)"}}, "url": "https://host/x", "list": ["a"],
    }  # fmt: skip


@pytest.mark.parametrize("text", ["{", '{"stage": "sft"}', "[]", "\0"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path_of(tmp_path / "model").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"model\.provenance\.json"):
        read(tmp_path / "model")


def test_none_is_none(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    assert read(tmp_path / "nowhere") is None


@pytest.mark.parametrize("model", MODELS)
def test_every_model_of_the_pipeline_agrees_with_the_lock_file(tiny_run: "TinyRun", model: str) -> None:
    own: dict[str, Any] | None = read(tiny_run.project.root / "models" / model)
    assert own is not None
    entry = recorded(tiny_run.project.root)[own["stage"]]
    assert (own["inputs"], own["code"], own["command"]) == (entry.inputs, entry.code, entry.command)
    assert own["params"] == entry.params
    assert own["params"]["seed"] == 1
