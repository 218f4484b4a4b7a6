"""Stage base: what the tokenizer and the base model learn from."""

import json
import runpy
from collections.abc import Callable
from datetime import datetime, tzinfo
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import chat_template_utils

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.chat import prompt_id
from rlhf_core.data.scorer import Scored
from rlhf_core.data.tokenizer import PROBE, encode_prompt, load_tokenizer
from rlhf_core.errors import UserError
from rlhf_core.models.hf import load_causal_lm
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.scoring import RewardSource, ScoreNormalisation
from rlhf_core.ppo.trainer import PPOTrainer
from tasks.base import DEMONSTRATIONS, PAIRS, execute
from tasks.datasets.raw import PRETRAINED, hashes_of_files
from tasks.params.base import BaseParams
from tasks.schemas.datasets import SCHEMAS
from tasks.stage.stage import Stage
from tests.architectures.zoo import download
from tests.rlhf_core.gguf_files import tiny_llama, write_gguf

TINY: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "rlhf_core" / "conftest.py")))

SCRATCH = {"vocabulary": 300, "context": 32, "layers": 1, "hidden": 8, "intermediate": 8, "heads": 1}
PARAMS = BaseParams.model_validate(
    {
        "source": "scratch", "scratch": SCRATCH, "pretrain": {"steps": 1, "batch_size": 2, "learning_rate": 1e-3},
        "pad_token": "<|pad|>", "eos_token": "<|end|>",
    }
)  # fmt: skip
PROMPT = [{"role": "user", "content": "hello"}]
ROW = {"prompt_id": prompt_id(PROMPT), "prompt": PROMPT, "split": "train"}
Base = Callable[..., dict[str, bytes]]


@pytest.fixture
def base(make_stage: Callable[..., Stage[Any]]) -> Base:
    """base(pair) -> the files of models/base, made from demonstrations and this pair."""

    def make(**pair: Any) -> dict[str, bytes]:
        rows = {path: [] for path in SCHEMAS if path.startswith("data/ingest/")} | {
            DEMONSTRATIONS: [
                {**ROW, "prompt_id": f"{place}", "response": text}
                for place, text in enumerate(("good morning", "good evening") * 10)
            ],
            PAIRS: [{**ROW, **pair}] if pair else [],
        }
        state = f"base-{pair.get('from_labels')}"
        stage = make_stage("base", PARAMS, ["models/base", "metrics/base.json"], rows, state=state)
        execute(stage)
        return {path.name: path.read_bytes() for path in stage.out("models/base").iterdir()}

    return make


def test_pairs_of_the_data_are_learned_and_labels_that_were_added_are_not(base: Base) -> None:
    """Else a new label changes the SFT model that a later round goes on from."""
    pair = {"chosen": "zebra zebra zebra", "rejected": "quagga quagga"}
    without = base()
    assert base(**pair, annotator="anna", from_labels=True) == without
    of_data = base(**pair, annotator=None, from_labels=False)
    assert of_data["tokenizer.json"] != without["tokenizer.json"]
    assert of_data["model.safetensors"] != without["model.safetensors"]


Pretrained = Callable[..., Path]


@pytest.fixture
def read(make_stage: Callable[..., Stage[Any]], tmp_path: Path) -> Pretrained:
    """read("model", **keys of base) -> models/base, made from data/raw/model."""

    def make(name: str, **more: Any) -> Path:
        params = BaseParams.model_validate({"source": "pretrained", "pretrained": {"model": name}} | more)
        rows: dict[str, list[Any]] = {path: [] for path in SCHEMAS if path.startswith("data/ingest/")}
        stage = make_stage("base", params, ["models/base", "metrics/base.json"], rows)
        noted = hashes_of_files(tmp_path / "data/raw", name)
        (tmp_path / PRETRAINED).parent.mkdir(exist_ok=True)
        (tmp_path / PRETRAINED).write_text(json.dumps(noted), encoding="utf-8")
        execute(stage)
        return stage.out("models/base")

    return make


@pytest.fixture
def pretrained(read: Pretrained, tmp_path: Path) -> Pretrained:
    """pretrained(**keys of base) -> models/base, made from data/raw/model: a Gemma 3 as the hub would give it."""
    download("gemma3", tmp_path / "data" / "raw" / "model")
    return partial(read, "model")


def test_a_model_that_changed_since_ingest_is_refused(pretrained: Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.datasets.raw.hashes_of_files", lambda *place: {"config.json": "another"})
    with pytest.raises(UserError, match="data/raw/model has other files than when `ingest` ran"):
        pretrained()


def rename(folder: Path, change: Callable[[str], str | None]) -> None:
    """Give the weights of a folder other names; None: leave the weight out."""
    weights = {new: tensor for name, tensor in load_file(folder / "model.safetensors").items() if (new := change(name))}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_wrapped_checkpoint_is_repaired_and_the_log_says_so(
    pretrained: Pretrained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = tmp_path / "data/raw/model"
    expected = load_file(raw / "model.safetensors")
    rename(raw, lambda name: f"module._orig_mod.{name}")
    found = load_file(pretrained() / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    said = capsys.readouterr().out
    assert "weights renamed: module._orig_mod.model.embed_tokens.weight is model.embed_tokens.weight, and" in said


def test_a_checkpoint_that_lacks_weights_is_refused(pretrained: Pretrained, tmp_path: Path) -> None:
    rename(tmp_path / "data/raw/model", lambda name: None if "layers.1.mlp" in name else name)
    with pytest.raises(
        UserError, match=r"missing \(model\.layers\.1\.mlp\.down_proj\.weight, .* transformers would draw"
    ):
        pretrained()


def test_rule_26_the_models_own_end_of_turn_is_the_end_in_all_three_files(
    pretrained: Pretrained, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pretrained()
    assert "answers end with <end_of_turn>, as the chat template closes them; the tokenizer's eos was <eos>" in (
        capsys.readouterr().out
    )
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    end, before = tokenizer.convert_tokens_to_ids(["<end_of_turn>", "<eos>"])
    settings = model.generation_config
    assert (tokenizer.eos_token_id, model.config.eos_token_id, settings.eos_token_id) == (end, end, [end, before])
    assert {tokenizer.pad_token_id, model.config.pad_token_id, settings.pad_token_id} == {tokenizer.pad_token_id}


def test_values_of_the_chat_template_are_saved_with_the_model(
    pretrained: Pretrained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "data/raw/model/chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt and not think %}{{ 'So: ' }}{% endif %}")
    loud, quiet = (
        AutoTokenizer.from_pretrained(pretrained(chat_template_kwargs={"think": value})) for value in (False, True)
    )
    assert "the chat template's think is false" in capsys.readouterr().out
    prompts = [tokenizer.decode(encode_prompt(tokenizer, PROBE)) for tokenizer in (loud, quiet)]
    assert prompts[0] == prompts[1] + "So: "
    with pytest.raises(UserError, match="does not read thinking; it reads think"):
        pretrained(chat_template_kwargs={"thinking": False})
    with pytest.raises(ValueError, match="it needs source: pretrained and format: chat"):
        pretrained(chat_template_kwargs={"think": False}, format="text")


def test_a_template_with_todays_date_gives_the_same_bytes_and_ids_on_every_day(
    pretrained: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "data/raw/model/chat_template.jinja"
    template.write_text("{{ 'Today is ' + strftime_now('%d %b %Y') + '.' }}" + template.read_text())
    saved, ids = [], []
    for year in (2027, 2031):
        monkeypatch.setattr(chat_template_utils, "datetime", _clock(year))
        folder = pretrained()
        saved.append({path.name: path.read_bytes() for path in folder.iterdir()})
        ids.append(encode_prompt(load_tokenizer(folder), PROMPT))
    assert saved[0] == saved[1]
    assert ids[0] == ids[1]
    assert "the chat template writes 26 Jul 2024 in place of today's date" in capsys.readouterr().out


def _clock(year: int) -> type[datetime]:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Clock":
            return cls(year, 1, 2, tzinfo=tz)

    return Clock


def test_the_parts_of_a_pretrained_model_that_are_not_read_are_in_the_log(
    pretrained: Pretrained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = tmp_path / "data/raw/model/model.safetensors"
    weights = load_file(raw)
    save_file(weights | {"v_head.summary.weight": weights["model.norm.weight"].clone()}, raw, metadata={"format": "pt"})
    pretrained()
    assert "not read, because the model has no place for them: v_head.summary.weight" in capsys.readouterr().out
    save_file(weights | {"score.weight": weights["model.norm.weight"][None].clone()}, raw, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"head for scores \(score\.weight\): it is a reward model"):
        pretrained()


@pytest.mark.parametrize("name", ["gguf", "gguf/tiny.gguf"])
def test_a_gguf_file_becomes_a_model_that_ppo_trains(name: str, read: Pretrained, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the package gguf (the extra [gguf])")
    (tmp_path / "data/raw/gguf").mkdir(parents=True)
    source = tiny_llama(TINY.tiny_lm)
    write_gguf(
        tmp_path / "data/raw/gguf/tiny.gguf", source, TINY.tiny_tokenizer(), tokenizer__ggml__padding_token_id=None
    )
    folder = read(name)
    tokenizer, policy = load_tokenizer(folder), load_causal_lm(folder)
    assert tokenizer.pad_token not in (None, tokenizer.eos_token)
    assert all(weight.equal(source.get_parameter(name)) for name, weight in policy.named_parameters())

    config = PPOConfig(**TINY.tiny_ppo_values(steps=1, critic={"kind": "shared"}))
    models = ActorCritic(config, policy, load_causal_lm(folder), None, seed=1)
    lengths = RewardSource(
        lambda answers: Scored([float(len(ids)) for ids in answers.response_ids]), ScoreNormalisation(4.0, 2.0)
    )
    row = PPOTrainer(config, models, tokenizer, lengths, TINY.tiny_prompts(), seed=1).step()
    assert row["kl"] == pytest.approx(0.0, abs=1e-5)
    assert row["update_kl"] > 0


def test_several_gguf_files_are_refused_by_their_names(read: Pretrained, tmp_path: Path) -> None:
    (tmp_path / "data/raw/two").mkdir(parents=True)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "data/raw/two" / name).touch()
    with pytest.raises(UserError, match=r"data/raw/two: has several GGUF files \(a\.gguf, b\.gguf\); name one of them"):
        read("two")
