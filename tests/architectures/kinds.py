"""Tokenizers in the kinds that pretrained models bring, trained on the demo world's text in a fraction of a second."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GemmaTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from rlhf_core.demo.world import DemoWorld

MERGES = 60
"""Tokens of a vocabulary beside its alphabet and its special tokens."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA3 = (
    "{% for m in messages %}{{ (bos_token if loop.first else '') + '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set told = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set told = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
    "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (told if loop.first else '') + m['content'] | trim + "
    "' [/INST]' }}{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
    "'Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + "
    "m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN2 = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
FALCON = (
    "{% for m in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}{{ {'system': 'System', 'user': 'User', "
    "'assistant': 'Falcon'}[m['role']] + ': ' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nFalcon:' }}{% endif %}"
)
FALCON_RW = (
    "{% if messages[0]['role'] != 'system' %}{{ raise_exception('The first message must be a system message') }}"
    "{% endif %}" + FALCON
)
OLMO2 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + "
    "(eos_token if m['role'] == 'assistant' else '') + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@cache
def texts() -> list[str]:
    """Prompts and answers of the demo world."""
    world = DemoWorld(1, domains=1, needs=2)
    return [text for prompt in world.prompts(60) for text in (prompt, world.demonstration(prompt, 0))]


def llama3() -> PreTrainedTokenizerBase:
    """Byte-level BPE without a pad token; 20 added special tokens; `bos` before every text."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    split = pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated")
    vocabulary, merges = _byte_level(pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)]))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    special += [f"<|reserved_special_token_{i}|>" for i in range(15)]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    first = (special[0], backend.token_to_id(special[0]))
    begin = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[first])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    return _fast(backend, LLAMA3, bos_token=special[0], eos_token="<|eot_id|>")


def unigram() -> PreTrainedTokenizerBase:
    """A unigram model with byte fallback, as of SentencePiece; `bos` before every text; no chat template."""
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=len(special + BYTES) + 90, special_tokens=special + BYTES, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    pieces = [tuple(piece) for piece in json.loads(tokenizer.to_str())["model"]["vocab"]]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _fast(backend, None, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def llama2() -> PreTrainedTokenizerBase:
    """BPE with byte fallback and a space before every text; `bos` before every text; no pad token."""
    vocabulary, merges = _byte_fallback(["<unk>", "<s>", "</s>"], pre_tokenizers.Metaspace(split=False))
    return LlamaTokenizer(vocab=vocabulary, merges=merges, chat_template=LLAMA2, add_bos_token=True)


def mistral() -> PreTrainedTokenizerBase:
    """As Llama 2's; its template has no place for a system message."""
    tokenizer = llama2()
    tokenizer.chat_template = MISTRAL
    return tokenizer


def phi3() -> PreTrainedTokenizerBase:
    """As Llama 2's without `bos`; the pad token is the eos token, and added tokens strip the text behind them."""
    vocabulary, merges = _byte_fallback(["<unk>", "<s>", "</s>"], pre_tokenizers.Metaspace(split=False))
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=merges, chat_template=PHI3, add_bos_token=False)
    names = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
    tokenizer.add_special_tokens({"eos_token": names[0], "pad_token": names[0]})
    tokenizer.add_tokens([AddedToken(name, rstrip=True, special=True, normalized=False) for name in names[1:]])
    return tokenizer


def gemma() -> PreTrainedTokenizerBase:
    """BPE with byte fallback and no space before a text; `bos` before every text; the template refuses a system
    message, and turns end with another token than `eos`."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    vocabulary, merges = _byte_fallback(special, pre_tokenizers.Metaspace(prepend_scheme="never"))
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=merges, chat_template=GEMMA)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
    return tokenizer


def qwen2() -> PreTrainedTokenizerBase:
    """Byte-level BPE without `bos`; the template inserts a system message."""
    tokenizer = _qwen(QWEN2)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    return tokenizer


def qwen3() -> PreTrainedTokenizerBase:
    """As Qwen 2's, with added tokens that are not special; the template changes earlier answers."""
    tokenizer = _qwen(QWEN3)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in ("<think>", "</think>")])
    return tokenizer


def gpt2() -> PreTrainedTokenizerBase:
    """Byte-level BPE; one special token for bos, eos and unk; no pad token, no chat template."""
    vocabulary, merges = _byte_level()
    return GPT2Tokenizer(vocab=_with(vocabulary, "<|endoftext|>"), merges=merges)


def opt() -> PreTrainedTokenizerBase:
    """Byte-level BPE; bos and eos are one token, which stands before every text; no chat template."""
    vocabulary, merges = _byte_level(first=["<s>", "<pad>", "</s>", "<unk>"])
    special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    return GPT2Tokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, **special)


def gpt_neox() -> PreTrainedTokenizerBase:
    """Byte-level BPE; one special token for bos, eos and unk, a pad token of its own; no chat template."""
    vocabulary, merges = _byte_level(first=["<|endoftext|>", "<|padding|>"])
    return GPTNeoXTokenizer(vocab=vocabulary, merges=merges, pad_token="<|padding|>")


def falcon() -> PreTrainedTokenizerBase:
    """Byte-level BPE with single digits; special tokens without a use; roles are text; no `bos`, no pad token."""
    steps = [pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(False), pre_tokenizers.Digits(True)]
    vocabulary, merges = _byte_level(pre_tokenizers.Sequence(steps))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    names = (">>TITLE<<", ">>QUESTION<<", ">>ANSWER<<", "<|endoftext|>")
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in names])
    return _fast(backend, FALCON, eos_token="<|endoftext|>")


def falcon_rw() -> PreTrainedTokenizerBase:
    """As Falcon's; its template requires a system message."""
    tokenizer = falcon()
    tokenizer.chat_template = FALCON_RW
    return tokenizer


def olmo2() -> PreTrainedTokenizerBase:
    """Byte-level BPE; bos and eos are one token, which the template writes; roles are text."""
    vocabulary, merges = _byte_level()
    vocabulary = _with(vocabulary, "<|endoftext|>", "<|pad|>")
    return GPT2Tokenizer(vocab=vocabulary, merges=merges, pad_token="<|pad|>", chat_template=OLMO2)


def _qwen(template: str) -> PreTrainedTokenizerBase:
    vocabulary, merges = _byte_level()
    tokenizer = Qwen2Tokenizer(vocab=_with(vocabulary, "<|endoftext|>"), merges=merges, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def _fast(backend: Tokenizer, template: str | None, **special: str) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **special
    )


def _with(vocabulary: dict[str, int], *names: str) -> dict[str, int]:
    return vocabulary | {name: len(vocabulary) + place for place, name in enumerate(names)}


def _byte_level(words: Any = None, first: Iterable[str] = ()) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges over the 256 bytes, behind the tokens `first`."""
    first, alphabet = list(first), sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(first) + 256 + MERGES, special_tokens=first, initial_alphabet=alphabet, show_progress=False
    )
    return _trained(words or pre_tokenizers.ByteLevel(add_prefix_space=False), trainer)


def _byte_fallback(special: list[str], words: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges over characters, behind the special tokens and the bytes."""
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 256 + 90, special_tokens=special + BYTES, limit_alphabet=50, show_progress=False
    )
    return _trained(words, trainer)


def _trained(words: Any, trainer: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words
    tokenizer.train_from_iterator(texts(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return dict(model["vocab"]), [tuple(pair) for pair in model["merges"]]


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    make.__name__: make
    for make in (
        llama3,
        unigram,
        llama2,
        mistral,
        phi3,
        gemma,
        qwen2,
        qwen3,
        gpt2,
        opt,
        gpt_neox,
        falcon,
        falcon_rw,
        olmo2,
    )
}
