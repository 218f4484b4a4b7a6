"""GGUF files: the same model and tokenizer as the one that was written, or a refusal that names what differs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Tokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from rlhf_core.errors import UserError
from rlhf_core.gguf import SPLITS, gguf_in, load_gguf, load_gguf_config, load_gguf_tokenizer
from rlhf_core.models.hf import load_causal_lm, save_checkpoint
from tests.rlhf_core.gguf_files import tiny_llama, write_gguf

pytest.importorskip("gguf", reason="needs the package gguf (the extra [gguf])")

IDS = torch.tensor([[7, 9, 31, 12, 5, 44]])
Write = Callable[..., Path]


@pytest.fixture
def model(build_lm: Any) -> PreTrainedModel:
    """A random Llama with grouped keys."""
    return tiny_llama(build_lm, num_key_value_heads=2, head_dim=8, intermediate_size=64)


@pytest.fixture
def write(tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Write:
    """write(**changes) -> the path of a GGUF file of the model, see `write_gguf`."""
    return lambda source=model, **changes: write_gguf(tmp_path / "tiny.gguf", source, tokenizer, **changes)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_float32_weights_give_exactly_the_logits_of_the_model(
    write: Write, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    lines: list[str] = []
    read, words = load_gguf(write(), lines.append)
    assert logits(read).equal(logits(model))
    assert words.get_vocab() == tokenizer.get_vocab()
    assert len(words) == len(tokenizer)
    assert words("what tea, 12")["input_ids"] == tokenizer("what tea, 12")["input_ids"]
    assert words.all_special_ids == tokenizer.all_special_ids
    assert words.chat_template == tokenizer.chat_template
    assert (words.eos_token, words.pad_token) == (tokenizer.eos_token, tokenizer.pad_token)
    total = sum(p.numel() for p in model.parameters())
    assert lines == [f"tiny.gguf: {total:,} weights in 20 tensors, dequantised to float32 from {total:,} F32"]

    save_checkpoint(tmp_path / "saved", read, words)
    assert "quantization_config" not in (tmp_path / "saved/config.json").read_text()
    assert logits(load_causal_lm(tmp_path / "saved")).equal(logits(model))


def test_quantised_weights_are_close_and_the_log_says_what_they_were(write: Write, model: PreTrainedModel) -> None:
    lines: list[str] = []
    read, _ = load_gguf(write(quantise=True), lines.append)
    for weight, exact in zip(read.parameters(), model.parameters(), strict=True):
        step = exact.abs().max() / 127 if exact.ndim == 2 else 0
        assert (weight - exact).abs().max() <= 0.51 * step
    assert not logits(read).equal(logits(model))
    assert "Q8_0, 160 F32" in lines[0]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_is_read(kind: str, write: Write, build_lm: Any) -> None:
    model = build_lm(kind)
    read, _ = load_gguf(write(model), print)
    assert type(read) is type(model)
    assert logits(read).equal(logits(model))


def test_transformers_reads_the_same_model(write: Write, model: PreTrainedModel) -> None:
    file = write()
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    assert logits(theirs).equal(logits(model))


def test_a_head_of_its_own_is_read(write: Write, build_lm: Any) -> None:
    untied = tiny_llama(build_lm, tie_word_embeddings=False)
    read, _ = load_gguf(write(untied), print)
    assert not read.config.tie_word_embeddings
    assert logits(read).equal(logits(untied))


def test_a_second_end_is_an_end(write: Write) -> None:
    read, words = load_gguf(write(tokenizer__ggml__eot_token_id=4), print)
    assert read.generation_config.eos_token_id == [words.eos_token_id, 4]


TEXT = "It's  2024, in\t12 cafe\u0301s\n\n  isn't IT? 3.14159\n"


def words_of(backend: Any, text: str = TEXT) -> list[str]:
    normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]


def test_texts_are_cut_as_the_tokenizers_of_these_models_cut_them(write: Write) -> None:
    def read(split: str) -> Any:
        return load_gguf_tokenizer(write(tokenizer__ggml__pre=split)).backend_tokenizer

    assert words_of(read("gpt-2")) == words_of(GPT2Tokenizer().backend_tokenizer)
    assert words_of(read("qwen2")) == words_of(Qwen2Tokenizer().backend_tokenizer)
    assert SPLITS["llama-bpe"] == GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]
    assert read("llama-bpe").model.ignore_merges
    assert words_of(read("llama-bpe"), " 12345") == ["Ġ", "123", "45"]
    assert words_of(read("smollm"), "in  2024") == ["in", "ĠĠ", "2", "0", "2", "4"]


@pytest.mark.parametrize(
    "stated", [{"tokenizer__ggml__add_bos_token": True}, {"tokenizer__ggml__pre": "llama-bpe"}], ids=["said", "llama"]
)
def test_a_text_begins_with_the_token_that_the_file_says_or_llama_has(write: Write, stated: dict[str, Any]) -> None:
    words = load_gguf_tokenizer(write(tokenizer__ggml__bos_token_id=2, **stated))
    assert words("eat")["input_ids"] == [2, *words("eat", add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"llama__rope__scaling__factor": 8.0},
            r"llama\.rope\.scaling\.factor \(8\.0\) is not read, so the model would",
        ),
        ({"llama__attention__value_length": 16}, r"llama\.attention\.value_length \(16\) is not read"),
        ({"llama__attention__head_count": [4, 2]}, r"llama\.attention\.head_count \(\[4, 2\]\) is not read"),
        ({"tokenizer__ggml__add_bos_token": True}, "tokens, merges and special tokens do not fit together"),
        ({"tokenizer__ggml__eos_token_id": 60}, "tokens, merges and special tokens do not fit together"),
        ({"tokenizer__ggml__merges": ["w hat", "zz z"]}, "tokens, merges and special tokens do not fit together"),
        ({"llama__block_count": None}, r"llama\.block_count is missing"),
        ({"llama__vocab_size": 61}, r"another shape than the settings say \(model\.embed_tokens\.weight\)"),
        ({"llama__feed_forward_length": 48}, r"another shape .* \(model\.layers\.0\.mlp\.down_proj\.weight, "),
        ({"general__architecture": "rwkv7"}, r"the architecture rwkv7 is not read \(only llama, qwen2, qwen3\)"),
        ({"extra": {"rope_freqs.weight": torch.ones(4)}}, r"no place in the model, .* \(rope_freqs\.weight\)"),
        (
            {"extra": {"blk.0.attn_q.bias": torch.ones(32)}},
            r"no place in the model, .*layers\.0\.self_attn\.q_proj\.bias",
        ),
        ({"without": "blk.1.ffn_up.weight"}, r"weights are missing \(model\.layers\.1\.mlp\.up_proj\.weight\)"),
        ({"tokenizer__ggml__pre": "tekken"}, "has a tokenizer gpt2/tekken; read are gpt2/gpt-2, "),
        ({"tokenizer__ggml__model": "llama"}, "has a tokenizer llama/gpt-2; read are"),
        ({"tokenizer__ggml__add_eos_token": True}, "has a tokenizer gpt2/gpt-2 that ends every text"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_transformers_leaves_out_is_refused_by_name(write: Write, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_gguf(write(**changes), print)


def test_a_damaged_file_and_another_file_are_refused(write: Write, tmp_path: Path) -> None:
    file = write()
    whole = file.read_bytes()
    for size in (3000, len(whole) - 100):
        file.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"tiny\.gguf: is damaged or no GGUF file"):
            load_gguf_config(file)
    file.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UserError, match=r"tiny\.gguf: is damaged or no GGUF file"):
        load_gguf_tokenizer(file)


def test_the_file_of_a_folder(tmp_path: Path) -> None:
    for name in ("a.gguf", "LICENSE"):
        (tmp_path / name).touch()
    assert gguf_in(tmp_path) == gguf_in(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    assert gguf_in(tmp_path / "none") is None
    with pytest.raises(UserError, match=r"LICENSE: is a file, and neither a \.gguf file nor a model folder"):
        gguf_in(tmp_path / "LICENSE")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UserError, match=r"has several GGUF files \(a\.gguf, b\.gguf\); name one of them"):
        gguf_in(tmp_path)
    (tmp_path / "config.json").touch()
    assert gguf_in(tmp_path) is None
