"""Models in GGUF files, the format of llama.cpp: settings, weights and tokenizer come from the file, and what is not
understood is refused. (transformers leaves it out without an error, and cuts some texts into other tokens.)"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from rlhf_core.errors import UserError
from rlhf_core.models.hf import Log

INSTEAD = "use the model's folder with config.json, tokenizer.json and safetensors"
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens in `tokenizer.ggml.token_type` that are one token wherever they are written."""
SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Keys that a file must have, after the name of the architecture, and their names in transformers."""
WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
"""Keys with the width of a head, which are the same number in the architectures that are read."""
OPTIONAL = (*WIDTHS, "attention.head_count_kv", "rope.freq_base", "vocab_size")
ARCHITECTURES = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
"""`general.architecture` and the classes. Mistral's files are called llama, too."""
WEIGHTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of modules in the file, within a layer `blk.N`, and in transformers."""
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
    """The language model of a GGUF file in float32, dropout off, and its tokenizer. `log` is called with the number and
    the types of the weights.

    Raises UserError without the package gguf, for a damaged file, for an architecture, a setting, a weight or a
    tokenizer that is not read, and where a weight is missing or its shape is not that of the settings.
    """
    reader, stated = _open(file)
    config, tokenizer = _config(file, reader, stated), _tokenizer(file, stated)
    weights, sizes = dict[str, Tensor](), Counter[str]()
    for tensor in reader.tensors:
        name, weight = _weight(file, tensor)
        if config.model_type == "llama" and (found := re.search(r"self_attn\.(q|k)_proj", name)):
            heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
            # llama.cpp turns pairs of neighbours, transformers the two halves of a head
            weight = weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
        weights[name] = weight.contiguous()
        sizes[tensor.tensor_type.name] += weight.numel()
    model, report = ARCHITECTURES[config.model_type].from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
    )
    for names, problem in (
        (report["unexpected_keys"], "weights have no place in the model, which would differ"),
        (report["missing_keys"], "weights are missing"),
        ((name for name, *_ in report["mismatched_keys"]), "weights have another shape than the settings say"),
    ):
        if listed := sorted(names):
            more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
            raise UserError(f"{file}: {problem} ({', '.join(listed[:3])}{more}); {INSTEAD}")
    if (turn_end := stated.get("tokenizer.ggml.eot_token_id")) is not None:
        ends = {turn_end, stated.get("tokenizer.ggml.eos_token_id", turn_end)}
        model.generation_config.eos_token_id = sorted(ends)
    kinds = ", ".join(f"{size:,} {kind}" for kind, size in sizes.most_common())
    log(f"{file.name}: {sizes.total():,} weights in {len(weights)} tensors, dequantised to float32 from {kinds}")
    return model, tokenizer


def load_gguf_config(file: Path) -> PreTrainedConfig:
    """The settings of the model in a GGUF file. Raises UserError as `load_gguf`; no weights are read."""
    return _config(file, *_open(file))


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


def _config(file: Path, reader: Any, stated: dict[str, Any]) -> PreTrainedConfig:
    kind = stated["general.architecture"]
    if kind not in ARCHITECTURES:
        raise UserError(f"{file}: the architecture {kind} is not read (only {', '.join(ARCHITECTURES)}); {INSTEAD}")
    given = {name.removeprefix(f"{kind}."): value for name, value in stated.items() if name.startswith(f"{kind}.")}
    if lacking := sorted(SETTINGS.keys() - given.keys()):
        raise UserError(f"{file}: {kind}.{lacking[0]} is missing; {INSTEAD}")
    unread = sorted(given.keys() - SETTINGS.keys() - set(OPTIONAL))
    unread += [name for name, value in given.items() if isinstance(value, list)]  # another number in each layer
    if not unread:
        width = given.get("attention.key_length", given["embedding_length"] // given["attention.head_count"])
        unread += [name for name in WIDTHS if given.get(name, width) != width]
    if unread:
        raise UserError(
            f"{file}: {kind}.{unread[0]} ({given[unread[0]]}) is not read, so the model would differ; {INSTEAD}"
        )
    tokens, tied = stated["tokenizer.ggml.tokens"], all(tensor.name != "output.weight" for tensor in reader.tensors)
    config: PreTrainedConfig = ARCHITECTURES[kind].config_class(
        **{new: given[old] for old, new in SETTINGS.items()},
        # What llama.cpp takes where the file does not say it.
        num_key_value_heads=given.get("attention.head_count_kv", given["attention.head_count"]),
        rope_parameters={"rope_type": "default", "rope_theta": given.get("rope.freq_base", 10000.0)},
        vocab_size=given.get("vocab_size", len(tokens)),
        head_dim=width,
        tie_word_embeddings=tied,
        bos_token_id=stated.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=stated.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=stated.get("tokenizer.ggml.padding_token_id"),
    )
    return config


def _weight(file: Path, tensor: Any) -> tuple[str, Tensor]:
    """The name in transformers and the numbers of a tensor, in float32. A tensor without a name there keeps its own."""
    from gguf import dequantize

    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
    name = tensor.name
    if found and (module := WEIGHTS.get(found[2])):
        name = f"{f'model.layers.{found[1]}.' if found[1] else ''}{module}.{found[3]}"
    try:
        return name, torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
    except NotImplementedError:
        raise UserError(f"{file}: {tensor.name} has the type {tensor.tensor_type.name}, which is not read") from None


def _tokenizer(file: Path, stated: dict[str, Any]) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of the tokens and merges of the file. That of transformers cuts numbers in another way
    (smollm), has a token more (where <|endoftext|> is none), or cuts words that are tokens (llama-bpe)."""
    kind, split = stated.get("tokenizer.ggml.model"), stated.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in SPLITS or stated.get("tokenizer.ggml.add_eos_token"):
        ends = " that ends every text" if stated.get("tokenizer.ggml.add_eos_token") else ""
        raise UserError(
            f"{file}: has a tokenizer {kind}/{split}{ends}; read are {', '.join(f'gpt2/{name}' for name in SPLITS)}; "
            f"{INSTEAD}"
        )
    tokens, kinds = stated["tokenizer.ggml.tokens"], stated.get("tokenizer.ggml.token_type", [])
    vocabulary = {token: place for place, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in stated.get("tokenizer.ggml.merges", [])]
    named = {name: stated.get(f"tokenizer.ggml.{key}_token_id") for name, key in ROLES.items()}
    by_default = split == "llama-bpe" and named["bos_token"] is not None  # as llama.cpp does
    begins = bool(stated.get("tokenizer.ggml.add_bos_token", by_default))
    if (
        len(vocabulary) < len(tokens)
        or not all(len(merge) == 2 and {*merge, "".join(merge)} <= vocabulary.keys() for merge in merges)
        or not all(place is None or place < len(tokens) for place in named.values())
        or (begins and named["bos_token"] is None)
    ):
        raise UserError(f"{file}: its tokens, merges and special tokens do not fit together; {INSTEAD}")
    special = {name: tokens[place] for name, place in named.items() if place is not None}

    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split == "llama-bpe"))
    pattern, cuts = SPLITS[split], list[Any]()
    if split == "smollm":
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
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
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=[token for token in control if token not in special.values()],
        chat_template=stated.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        padding_side="left",
        **special,
    )
    tokenizer.name_or_path = str(file)  # for messages
    return tokenizer


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
