"""Models in GGUF files, the format of llama.cpp. transformers reads the weights, with the package `gguf`, and leaves
out without an error what it does not know: its model is compared with the file. The tokenizer is built here."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf_core.errors import UserError
from rlhf_core.models.hf import Log, without_dropout

CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens in `tokenizer.ggml.token_type` that are one token wherever they are written."""
SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
"""Keys of the file, after the name of the architecture, and what they are called in transformers. A file with another
key has a model that transformers would not compute."""
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Special tokens, by their names in transformers and in the file."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBER| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": None,
    "smollm": None,
    "qwen2": WORDS.replace("NUMBER", ""),
    "llama-bpe": WORDS.replace("NUMBER", "{1,3}"),
}
"""How texts are cut into words before the merges, by llama.cpp's names; None: as GPT-2 does. SmolLM's are cut at each
digit before."""


def gguf_in(place: Path) -> Path | None:
    """The GGUF file that a path names: itself, or the only one in a folder without config.json; None for a folder of
    another kind. Raises UserError for several, and for another file."""
    if place.is_file() and place.suffix != ".gguf":
        raise UserError(f"{place}: is a file, and neither a .gguf file nor a model folder")
    if not place.is_dir() or (place / "config.json").exists():
        return place if place.is_file() else None
    found = sorted(place.glob("*.gguf"))
    if len(found) > 1:
        raise UserError(f"{place}: has several GGUF files ({', '.join(file.name for file in found)}); name one of them")
    return found[0] if found else None


def load_gguf(file: Path, log: Log) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The language model of a GGUF file in float32, dropout off, and its tokenizer. `log` is called with the types of
    the weights.

    Raises UserError without the package gguf, for a damaged file, an architecture or a tokenizer that transformers does
    not read, and where settings, weights or vocabulary differ from those in the file.
    """
    reader, stated = _open(file)
    config, tokenizer = _config(file, stated), _tokenizer(file, stated)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:  # a type that is unknown to it
        raise UserError(f"{file}: transformers cannot read its weights ({_line(error)})") from None
    if missing := sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}):
        raise UserError(f"{file}: weights are missing or have another shape ({_some(missing)})")
    shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
    surplus = Counter(shapes.values()) - Counter(tuple(weight.shape) for weight in model.parameters())
    if unread := [name for name, shape in shapes.items() if surplus[shape]]:
        raise UserError(f"{file}: transformers does not read its weights {_some(unread)}, so the model would differ")
    model.hf_quantizer.remove_quantization_config(model)  # its weights are plain numbers
    if (turn_end := stated.get("tokenizer.ggml.eot_token_id")) is not None and model.generation_config is not None:
        model.generation_config.eos_token_id = sorted({int(tokenizer.eos_token_id), int(turn_end)})
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    kinds = ", ".join(f"{size:,} {kind}" for kind, size in sizes.most_common())
    log(f"{file.name}: {sum(sizes.values()):,} weights in {len(shapes)} tensors, dequantised to float32 from {kinds}")
    return model, tokenizer


def load_gguf_config(file: Path) -> PreTrainedConfig:
    """The settings of the model in a GGUF file. Raises UserError as `load_gguf`; no weights are read."""
    return _config(file, _open(file)[1])


def load_gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file. Raises UserError as `load_gguf`; no weights are read."""
    return _tokenizer(file, _open(file)[1])


def _open(file: Path) -> tuple[Any, dict[str, Any]]:
    """The opened file, and its metadata."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(
            f"{file}: GGUF files are read with the package gguf, which is not installed: pip install --constraint "
            "constraints.txt gguf"
        ) from None
    try:
        reader = GGUFReader(file)
        stated = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"{file}: is damaged or no GGUF file ({_line(error)}); download it again") from None
    if "general.architecture" not in stated or "tokenizer.ggml.tokens" not in stated:
        raise UserError(f"{file}: holds no language model (general.architecture or tokenizer.ggml.tokens is missing)")
    return reader, stated


def _config(file: Path, stated: dict[str, Any]) -> PreTrainedConfig:
    kind = stated["general.architecture"]
    try:
        config = without_dropout(AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name))
    except (KeyError, ValueError) as error:
        raise UserError(f"{file}: transformers cannot read the architecture {kind} ({_line(error)})") from None
    wanted = {name.removeprefix(f"{kind}."): value for name, value in stated.items() if name.startswith(f"{kind}.")}
    if unknown := sorted(wanted.keys() - SETTINGS.keys()):
        raise UserError(
            f"{file}: transformers does not read {kind}.{unknown[0]} ({wanted[unknown[0]]}), so the model would "
            "differ; use the model's folder with config.json and safetensors"
        )
    # What llama.cpp takes where the file says nothing.
    wanted.setdefault("vocab_size", len(stated["tokenizer.ggml.tokens"]))
    wanted.setdefault("rope.freq_base", 10000.0)
    wanted.setdefault("attention.head_count_kv", wanted.get("attention.head_count"))
    rope = config.rope_parameters or {}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    made = {**config.to_dict(), "head_dim": width, "rope_theta": rope.get("rope_theta")}
    for name, value in wanted.items():
        if made.get(SETTINGS[name]) != value:
            raise UserError(
                f"{file}: {kind}.{name} is {value}, and transformers makes a model with {made.get(SETTINGS[name])}; "
                "use the model's folder with config.json and safetensors"
            )
    vars(config).pop("_model_name_or_path", None)  # the name of the model in the file
    return config


def _tokenizer(file: Path, stated: dict[str, Any]) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of the tokens and merges of the file. That of transformers cuts numbers in another way
    (smollm), has a token more (where <|endoftext|> is none), or cuts words that are tokens (llama-bpe)."""
    kind, split = stated.get("tokenizer.ggml.model"), stated.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in SPLITS or stated.get("tokenizer.ggml.add_eos_token"):
        ends = " that ends every text" if stated.get("tokenizer.ggml.add_eos_token") else ""
        raise UserError(
            f"{file}: has a tokenizer {kind}/{split}{ends}; read are {', '.join(f'gpt2/{name}' for name in SPLITS)}; "
            "use the model's folder with tokenizer.json"
        )
    tokens, kinds = stated["tokenizer.ggml.tokens"], stated.get("tokenizer.ggml.token_type", [])
    vocabulary = {token: place for place, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in stated.get("tokenizer.ggml.merges", [])]
    named = {name: stated.get(f"tokenizer.ggml.{key}_token_id") for name, key in ROLES.items()}
    special = {name: tokens[place] for name, place in named.items() if place is not None and place < len(tokens)}
    begins = bool(stated.get("tokenizer.ggml.add_bos_token"))
    if len(vocabulary) < len(tokens) or not all("".join(merge) in vocabulary for merge in merges):
        raise UserError(f"{file}: is damaged: its tokens and merges do not fit together; download it again")
    if begins and "bos_token" not in special:
        raise UserError(f"{file}: is damaged: every text begins with a token that is not named; download it again")

    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=SPLITS[split] is None)
    first = pre_tokenizers.Digits(individual_digits=True) if split == "smollm" else None
    if pattern := SPLITS[split]:
        first = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.pre_tokenizer = byte_level if first is None else pre_tokenizers.Sequence([first, byte_level])
    backend.normalizer = normalizers.NFC() if split == "qwen2" else None
    backend.decoder = decoders.ByteLevel()
    if begins:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, vocabulary[bos])]
        )
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == CONTROL]
    further = [token for token, kind in zip(tokens, kinds, strict=False) if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False) for token in further])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=[token for token in control if token not in special.values()],
        chat_template=stated.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        padding_side="left",
        **special,
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
