"""`leash export`: the copy loads as its card says, the card agrees with the run, and what does not fit is refused."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow.transformers
import pytest
from huggingface_hub import ModelCard
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.commands.export.export import licence_of
from rlhf_core.config.base import ScratchConfig
from rlhf_core.config.lora import LoraSettings
from rlhf_core.data.tokenizer import encode_prompt, load_tokenizer, train_bpe
from rlhf_core.errors import UserError
from rlhf_core.models.hf import build_llama, load_causal_lm, save_checkpoint
from rlhf_core.models.lora import add_lora
from tasks.base import load_pretrained
from tests.conftest import call
from tests.elsewhere import save_language_model
from tests.tasks.page.conftest import write_inputs

GRAPH: dict[str, tuple[list[str], list[str], list[str]]] = {  # stage: deps, params, outs
    "ingest": (["data/raw"], ["ingest"], ["metrics/ingest.json"]),
    "base": (["metrics/ingest.json"], ["base"], ["models/base.txt"]),
    "ppo": (["models/base.txt"], ["ppo", "seed"],
            ["metrics/preferences.json", "metrics/reward.json", "metrics/ppo.json"]),
    "select": (["metrics/ppo.json"], ["seed"],
               ["models/policy", "models/policy.provenance.json", "metrics/select.json"]),
    "evaluate": (["models/policy", "metrics/ppo.json"], ["evaluate"], ["metrics/evaluate.json"]),
}  # fmt: skip
WORKER = """
import pathlib, shutil, sys

for out in map(pathlib.Path, sys.argv[1:]):
    source = "made" / out
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, out) if source.is_dir() else shutil.copyfile(source, out)
"""
HUB = {"source": "pretrained", "pretrained": {"model": "owner/base", "revision": "a" * 40}}
SCRATCH = {"source": "scratch", "scratch": {"layers": 1}}
PARAMS = {
    "seed": 3,
    "ingest": {"source": "demo", "demo": {}},
    "base": SCRATCH,
    "ppo": {"steps": 7, "lora": None},
    "evaluate": {"max_new_tokens": 5, "temperature": 0.7},
}
TEXTS = ["what shall i eat? an egg", "this film is good"]


def scratch(folder: Path, plain: bool = False) -> None:
    tokenizer = train_bpe(TEXTS, 300, "<|pad|>", "<|end|>", 96, plain)
    config = ScratchConfig(vocabulary=300, context=96, layers=1, hidden=16, intermediate=16, heads=2)
    save_checkpoint(folder, build_llama(config, tokenizer, 0), tokenizer)


def pretrained(folder: Path, lora: bool = False) -> None:
    """A full model with a tokenizer from elsewhere, as the stage `base` takes it; `lora`: with merged adapters."""
    source = save_language_model(folder.with_name("source"), "gpt2")
    model, tokenizer = load_pretrained(source, log=lambda _: None)
    if lora:
        adapter = add_lora(model, LoraSettings(rank=2), 0)
        for parameter in adapter.parameters():
            parameter.data.normal_()
        model = adapter.merge()
    save_checkpoint(folder, model, tokenizer)


MODELS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "scratch": (scratch, {}),
    "text": (lambda folder: scratch(folder, plain=True), {"base": SCRATCH | {"format": "text"}}),
    "full": (pretrained, {"base": HUB}),
    "lora": (lambda folder: pretrained(folder, lora=True), {"base": HUB, "ppo": {"steps": 7, "lora": {"rank": 2}}}),
}


def make_project(root: Path, kind: str) -> Path:
    """A project whose stages, run by DVC, copy what is made here."""
    save, changed = MODELS[kind]
    write_inputs(root)
    shutil.move(root / "metrics", root / "made" / "metrics")
    ppo = json.loads((root / "made/metrics/ppo.json").read_text())
    ppo["alerts"] = [{"name": "repetition", "step": 4, "message": "answers repeat words", "remedy": "more KL"}]
    (root / "made/metrics/ppo.json").write_text(json.dumps(ppo))
    save(root / "made/models/policy")
    (root / "made/models/base.txt").write_text("base\n")
    record = {"stage": "select", "inputs": {"metrics/ppo.json": "1" * 32}, "exemptions": ["deterministic: false"]}
    record |= {"command": "", "params": {}, "code": {}, "versions": {}}
    (root / "made/models/policy.provenance.json").write_text(json.dumps(record))
    (root / "worker.py").write_text(WORKER)
    (root / "data/raw").mkdir(parents=True)
    (root / "data/raw/some.txt").write_text("raw\n")
    stages = {
        name: {"cmd": f"{sys.executable} worker.py {' '.join(outs)}", "deps": deps, "params": params, "outs": outs}
        for name, (deps, params, outs) in GRAPH.items()
    }
    YAML().dump({"stages": stages}, root / "dvc.yaml")
    YAML().dump(PARAMS | changed, root / "params.yaml")
    call(root, "git", "init", "--quiet")
    call(root, sys.executable, "-m", "dvc", "init", "--quiet")
    call(root, sys.executable, "-m", "dvc", "repro", "--quiet")
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("a project & more"), "scratch")


@pytest.fixture
def project(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = shutil.copytree(finished, tmp_path / "a project & more", symlinks=True)
    monkeypatch.chdir(root)
    return root


def export(*words: str) -> Result:
    return CliRunner().invoke(app, ["export", *words])


def refused(*words: str) -> str:
    result = export(*words)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.mark.parametrize("kind", MODELS)
def test_the_copy_loads_as_its_card_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_project(tmp_path / "project", kind)
    monkeypatch.chdir(root)
    result = export("models/policy", "../policy")
    assert result.exit_code == 0, result.output
    monkeypatch.chdir(tmp_path)
    card = ModelCard.load(tmp_path / "policy" / "README.md")
    [block] = [part.partition("```")[0] for part in card.text.split("```python\n")[1:]]
    names: dict[str, Any] = {}
    exec(block, names)
    ours = load_tokenizer(root / "models/policy")
    said = [{"role": "user", "content": "This film is" if kind == "text" else "What is a good breakfast?"}]
    assert names["ids"][0].tolist() == encode_prompt(ours, said)
    assert names["output"].shape[1] <= names["ids"].shape[1] + 5
    theirs, model = names["model"].state_dict(), load_causal_lm(root / "models/policy")
    assert all((theirs[key] == value).all() for key, value in model.state_dict().items())
    assert card.data.base_model == ("owner/base" if kind in ("full", "lora") else None)
    assert ("LoRA adapters" in card.text) == (kind == "lora")
    assert ("no chat turns" in card.text) == (kind == "text")


def test_the_card_agrees_with_the_run(project: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (project / "models").rglob("*") if path.is_file()}
    (tmp_path / "out").mkdir()  # an empty folder is taken
    result = export("models/policy", "../out")
    assert result.exit_code == 0, result.output
    assert {path: path.read_bytes() for path in (project / "models").rglob("*") if path.is_file()} == before
    card = ModelCard.load(tmp_path / "out" / "README.md")
    card_text = card.text
    figures = json.loads((project / "metrics/evaluate.json").read_text())["models"]["policy"]
    shown = {one.metric_type: one.metric_value for one in card.data.eval_results}
    assert shown["win_rate"] == figures["win_rate"]
    assert "95% interval 0.85 to 0.9125" in next(r.metric_name for r in card.data.eval_results)
    assert card.data.tags == ["rlhf", "ppo", "leash"]
    assert "| Win rate against SFT | a tie is half | – | 88.2% (85.0% to 91.2%) |" in card_text
    lock = YAML(typ="safe").load(project / "dvc.lock")["stages"]
    [digest] = [one["md5"] for one in lock["evaluate"]["deps"] if one["path"] == "models/policy"]
    assert f"| this model, without card and provenance | `{digest}` |" in card_text
    assert "| ppo | `steps=7 lora=None` |" in card_text
    assert "| base | `source=scratch scratch.layers=1` |" in card_text
    assert "Another run may give other weights: deterministic: false" in card_text
    assert "PPO's alert `repetition` at step 4: answers repeat words" in card_text
    everything = "".join(path.read_text(errors="replace") for path in (tmp_path / "out").iterdir() if path.is_file())
    assert str(tmp_path) not in everything
    assert not list(tmp_path.glob(".*partial"))


def test_mlflow_loads_the_copy(project: Path, tmp_path: Path) -> None:
    assert export("models/policy", "../out").exit_code == 0
    pipeline = mlflow.transformers.load_model(str(tmp_path / "out"))
    assert pipeline.model.config.hidden_size == 16


def test_another_model_than_the_evaluated_one_is_refused_with_both_hashes(project: Path, tmp_path: Path) -> None:
    lock = YAML(typ="safe").load(project / "dvc.lock")["stages"]
    [measured] = [one["md5"] for one in lock["evaluate"]["deps"] if one["path"] == "models/policy"]
    (project / "models/policy/config.json").open("a").write(" ")
    error = refused("models/policy", "../out")
    assert measured in error
    assert error.count(".dir") == 2
    assert "`leash run`" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["metrics/evaluate.json", "metrics/ppo.json", "models/policy.provenance.json"])
def test_metrics_and_provenance_of_another_run_are_refused(project: Path, file: str) -> None:
    (project / file).open("a").write(" ")
    assert f"error: {file}: has the hash" in refused("models/policy", "../out")


def test_inputs_that_were_made_again_are_refused(project: Path) -> None:
    (project / "data/raw/some.txt").write_text("other\n")
    (project / "made/metrics/ingest.json").open("a").write("\n")
    call(project, sys.executable, "-m", "dvc", "repro", "--quiet", "--single-item", "ingest")
    assert "made again since" in refused("models/policy", "../out")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("models/policy", "made"), "is there already"),
        (("models/policy", "models/policy/inside"), "the pipeline uses models/policy"),
        (("models/policy", "data/raw/out"), "the pipeline uses data/raw"),
        (("models/reward", "../out"), "not among the models that the run evaluates; dvc.lock has models/policy"),
        (("metrics/ppo.json", "../out"), "not among the models that the run evaluates"),
    ],
)
def test_wrong_folders_are_refused(project: Path, words: tuple[str, str], said: str) -> None:
    assert said in refused(*words)


def test_nothing_half_written_remains(project: Path, tmp_path: Path) -> None:
    shutil.rmtree(project / ".dvc/cache")
    assert "cache" in refused("models/policy", "../out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [project.name]


def test_the_licence_of_the_base_model(tmp_path: Path) -> None:
    fresh, raw = tmp_path / "fresh", tmp_path / "data/raw/base"
    fresh.mkdir()
    local = {"source": "pretrained", "pretrained": {"model": "base"}}
    found, said = licence_of(tmp_path, fresh, HUB)
    assert found == {
        "license": "other",
        "license_name": "base-model",
        "license_link": "https://huggingface.co/owner/base",
    }
    assert licence_of(tmp_path, fresh, SCRATCH)[0] == {}
    with pytest.raises(UserError, match="data/raw/base: not here"):
        licence_of(tmp_path, fresh, local)
    raw.mkdir(parents=True)
    assert "look it up" in licence_of(tmp_path, fresh, local)[1]
    (raw / "LICENSE").write_text("free\n")
    assert licence_of(tmp_path, fresh, local)[0]["license_link"] == "LICENSE"
    assert (fresh / "LICENSE").read_text() == "free\n"
    (raw / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model\n")
    found, said = licence_of(tmp_path, fresh, local)
    assert found == {"license": "apache-2.0"}
    assert "`apache-2.0`" in said
