"""What the attacks share: a pickle that acts when it is read, and an untrusted model folder."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlhf_core.config.base import ScratchConfig
from rlhf_core.data.tokenizer import train_bpe
from rlhf_core.models.hf import build_llama, save_checkpoint

TEXTS = ["What shall I eat for breakfast?", "Eat some oats and an egg, because they keep you full."] * 4
SCRATCH = ScratchConfig(vocabulary=300, context=512, layers=1, hidden=16, intermediate=24, heads=2)


class Armed:
    """Whoever unpickles this makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def arm(tmp_path: Path) -> Callable[[Path], Path]:
    """Replaces a file by an armed pickle, plain or in torch's own wrapping; returns what it would make."""
    made = []

    def write(path: Path, wrapped: bool = True) -> Path:
        mark = tmp_path / f"owned-{len(made)}"
        made.append(mark)
        if wrapped:
            torch.save({"state": Armed(mark)}, path)
        else:
            path.write_bytes(pickle.dumps(Armed(mark), protocol=2))
        return mark

    return write


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer, as anybody might offer it. Copy it before a change."""
    folder = tmp_path_factory.mktemp("offered") / "plain"
    tokenizer = train_bpe(TEXTS, SCRATCH.vocabulary, "<|pad|>", "<|end|>", SCRATCH.context)
    save_checkpoint(folder, build_llama(SCRATCH, tokenizer, 1), tokenizer)
    return folder


@pytest.fixture
def offered(plain_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the plain model with changes to its config.json."""

    def make(name: str = "model", **changes: Any) -> Path:
        folder = Path(shutil.copytree(plain_model, tmp_path / name))
        edit_json(folder / "config.json", **changes)
        return folder

    return make


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None takes one away."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), encoding="utf-8")


CONFIGURATION = """
from transformers import PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "own-kind"

    def __init__(self, vocab_size=300, hidden_size=8, max_position_embeddings=512, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.max_position_embeddings, self.num_hidden_layers = max_position_embeddings, 1
        super().__init__(**kwargs)
"""
MODELLING = """
import os

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_own import OwnConfig

os.makedirs({mark!r}, exist_ok=True)


class OwnLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, attention_mask=None, labels=None, **unused):
        logits = self.head(self.embed(input_ids))
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
"""


@pytest.fixture
def own_code(plain_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Writes a model with its own Python code into a folder; returns what that code makes when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def write(folder: Path) -> Path:
        mark = tmp_path / "own-code-ran"
        shutil.copytree(plain_model, folder)
        size = len(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
        places = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnLM"}
        content = {"model_type": "own-kind", "architectures": ["OwnLM"], "auto_map": places, "vocab_size": size}
        content |= {"hidden_size": 8, "eos_token_id": 1, "pad_token_id": 0}
        (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
        (folder / "configuration_own.py").write_text(CONFIGURATION, encoding="utf-8")
        (folder / "modeling_own.py").write_text(MODELLING.format(mark=str(mark)), encoding="utf-8")
        draw = torch.Generator().manual_seed(0)
        weights = {name: torch.randn(size, 8, generator=draw) for name in ("embed.weight", "head.weight")}
        save_file(weights | {"head.bias": torch.zeros(size)}, folder / "model.safetensors", metadata={"format": "pt"})
        return mark

    return write
