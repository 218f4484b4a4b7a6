"""Tiny GGUF files, written as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.layers.": "blk.",
}  # fmt: skip


def write_gguf(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, quantise: bool = False, **changes: Any
) -> Path:
    """Write a Llama, Qwen 2 or Qwen 3 and its byte-level tokenizer; `quantise`: matrices in Q8_0, else all in float32.

    `changes`: metadata by their names with `__` for dots; None leaves one out. `without`: a tensor that is left out;
    `extra`: tensors that are added.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    config, kind = model.config, model.config.model_type
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = {token.content for token in tokenizer.added_tokens_decoder.values()}
    metadata: dict[str, Any] = {
        "general.name": "tiny",
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{kind}.rope.dimension_count": config.hidden_size // config.num_attention_heads,
        f"{kind}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{kind}.vocab_size": len(vocabulary),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in vocabulary],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
    }
    without, extra = changes.pop("without", None), changes.pop("extra", {})
    metadata |= {name.replace("__", "."): value for name, value in changes.items()}
    writer = GGUFWriter(path, metadata.pop("general.architecture", kind))
    for name, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    for name, weight in {**dict(model.named_parameters()), **extra}.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if name == without:
            continue
        data = weight.detach().float()
        for part, heads in {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.items():
            if kind == "llama" and part in name and data.ndim == 2:  # the halves of each head become pairs
                data = data.reshape(heads, 2, -1, data.shape[1]).transpose(1, 2).reshape(data.shape)
        stored = GGMLQuantizationType.Q8_0 if quantise and data.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(data.contiguous().numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_llama(build: Any, **settings: Any) -> PreTrainedModel:
    """The Llama-type model of `build_lm`, with other settings."""
    config = build("llama").config
    torch.manual_seed(0)
    return type(build("llama"))(type(config)(**{**config.to_dict(), **settings})).eval()
