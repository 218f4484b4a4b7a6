"""Tiny random models of the architectures that Leash is tested with, each in a folder as it would be downloaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.architectures.kinds import KINDS

CONTEXT = 256
WINDOW = 12
"""Tokens of a sliding window; prompts are longer."""

WEIGHTS = {"initializer_range": 0.1, "max_position_embeddings": CONTEXT}
SIZE = WEIGHTS | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SIZE | {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"num_experts_per_tok": 2}
OPT = {
    **{name: value for name, value in SIZE.items() if name not in ("intermediate_size", "initializer_range")},
    "ffn_dim": 48,
    "init_std": 0.1,
    "layerdrop": 0.1,
}


@dataclass(frozen=True)
class Architecture:
    """A row of the table."""

    title: str
    config: type[PreTrainedConfig]
    settings: Mapping[str, Any]
    tokenizer: str
    """A key of `KINDS`."""
    detail: str = ""
    """What is special about it, for the table."""
    spare: int = 0
    """Embeddings beyond the tokenizer's tokens."""


ROWS = {
    "llama": Architecture("Llama 3", LlamaConfig, GROUPED | {"tie_word_embeddings": False}, "llama3", "grouped keys"),
    "llama_tied": Architecture("Llama", LlamaConfig, SIZE | {"tie_word_embeddings": True}, "unigram"),
    "qwen2": Architecture(
        "Qwen 2", Qwen2Config, GROUPED | {"tie_word_embeddings": True}, "qwen2", "more embeddings than tokens", spare=13
    ),
    "qwen3": Architecture("Qwen 3", Qwen3Config, GROUPED | {"head_dim": 8}, "qwen3"),
    "mistral": Architecture(
        "Mistral", MistralConfig, GROUPED | {"sliding_window": WINDOW}, "mistral", "sliding window"
    ),
    "gemma2": Architecture(
        "Gemma 2",
        Gemma2Config,
        GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW},
        "gemma",
        "sliding window in every second layer, soft-capped logits",
    ),
    "gemma3": Architecture(
        "Gemma 3 (text)",
        Gemma3TextConfig,
        GROUPED
        | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        "gemma",
        "sliding window in most layers",
    ),
    "phi3": Architecture(
        "Phi-3",
        Phi3Config,
        SIZE | {"num_key_value_heads": 4, "sliding_window": WINDOW, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
        "phi3",
        "sliding window, dropout in its configuration",
    ),
    "gpt2": Architecture(
        "GPT-2",
        GPT2Config,
        {"initializer_range": 0.1, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
        "gpt2",
        "absolute positions",
    ),
    "gpt_neox": Architecture("GPT-NeoX", GPTNeoXConfig, SIZE | {"hidden_dropout": 0.1}, "gpt_neox"),
    "opt": Architecture("OPT", OPTConfig, OPT | {"word_embed_proj_dim": 32}, "opt", "layerdrop in its configuration"),
    "opt_projected": Architecture(
        "OPT (350m)",
        OPTConfig,
        OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
        "opt",
        "embeddings narrower than the body",
    ),
    "falcon": Architecture(
        "Falcon",
        FalconConfig,
        {name: value for name, value in SIZE.items() if name != "intermediate_size"}
        | {"multi_query": True, "parallel_attn": True, "bias": False},
        "falcon",
        "one key for all heads",
    ),
    "falcon_alibi": Architecture(
        "Falcon (RW)",
        FalconConfig,
        {name: value for name, value in SIZE.items() if name != "intermediate_size"}
        | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        "falcon_rw",
        "ALiBi in place of positions",
    ),
    "olmo2": Architecture("OLMo 2", Olmo2Config, GROUPED, "olmo2"),
    "mixtral": Architecture("Mixtral", MixtralConfig, EXPERTS | {"num_local_experts": 4}, "llama2", "4 experts"),
    "qwen2_moe": Architecture(
        "Qwen 2 MoE",
        Qwen2MoeConfig,
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32},
        "qwen2",
        "4 experts and a shared one",
    ),
    "qwen3_moe": Architecture(
        "Qwen 3 MoE",
        Qwen3MoeConfig,
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
        "qwen3",
        "4 experts",
    ),
    "granite": Architecture("Granite", GraniteConfig, GROUPED, "gpt2"),
    "mamba": Architecture(
        "Mamba", MambaConfig, {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "gpt_neox", "no attention"
    ),
}


def download(name: str, folder: Path) -> Path:
    """A folder as the hub would give it: random weights, the tokenizer, no repairs."""
    row, tokenizer = ROWS[name], KINDS[ROWS[name].tokenizer]()
    torch.manual_seed(1)
    config = row.config(
        **row.settings,
        vocab_size=len(tokenizer) + row.spare,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
