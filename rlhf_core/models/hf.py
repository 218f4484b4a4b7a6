"""Hugging Face models: building, loading, saving to equal bytes, and scalar models (reward model, critic), which output
one number a token instead of logits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_core import files
from rlhf_core.config.base import ScratchConfig
from rlhf_core.errors import UserError
from rlhf_core.finite import require_finite
from rlhf_core.loading import load_config, loading

BIAS = "score_bias"
"""The key of config.json with the bias of a head that has none in its architecture; only `load_scalar_model` reads
it."""
UNSTABLE_FILES = ("training_args.bin",)
UNSTABLE_KEYS = {"tokenizer_config.json": ("local_files_only", "name_or_path"), "config.json": ("_name_or_path",)}


def build_llama(config: ScratchConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A randomly initialised Llama-type model that fits the tokenizer. Equal seeds give equal weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=config.context,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def load_causal_lm(
    path: str | Path, revision: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal language model in float32, dropout off, from a folder (safetensors only) or a hub id at a revision.

    `trust_remote_code` lets the folder's own Python code run. Raises UserError, see `loading`.
    """
    with loading(path):
        config = without_dropout(load_config(path, revision, trust_remote_code))
        return _weights(AutoModelForCausalLM, path, config, revision, trust_remote_code)


def load_scalar_model(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A reward model or critic in float32, dropout off. Raises UserError when the folder has no scalar head, and as
    `load_causal_lm`."""
    with loading(path):
        config = without_dropout(load_config(path, None, trust_remote_code))
        if config.num_labels != 1:
            raise UserError(f"{path}: expected one output a token, the model has {config.num_labels}")
        _require_scalar_class(config)
        model = _weights(AutoModelForSequenceClassification, path, config, None, trust_remote_code)
    if (bias := getattr(config, BIAS, None)) is not None:
        map_scalar(model, 1.0, bias)
    return model


@torch.no_grad()
def map_scalar(model: PreTrainedModel, scale: float, shift: float) -> None:
    """Make a scalar model's output `scale`·output + `shift`, by its head, which gets a bias."""
    head = scalar_head(model)
    head.weight.mul_(scale)
    if head.bias is None:
        head.bias = torch.nn.Parameter(head.weight.new_zeros(1))
        setattr(model.config, BIAS, 0.0)
    head.bias.mul_(scale).add_(shift)


def _weights(
    kind: Any, path: str | Path, config: PreTrainedConfig, revision: str | None, trust_remote_code: bool
) -> PreTrainedModel:
    return kind.from_pretrained(
        str(path),
        revision=revision,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
    )


def scalar_model_from(path: str | Path, seed: int, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The body of the model at `path` under a fresh scalar head, weights N(0, 1/(d+1)) (Stiennon et al. 2020). Raises
    UserError as `load_causal_lm`."""
    with loading(path):
        config = without_dropout(load_config(path, None, trust_remote_code, num_labels=1))
        _require_scalar_class(config)
        model = _weights(AutoModelForSequenceClassification, path, config, None, trust_remote_code)
    generator = torch.Generator().manual_seed(seed)
    head = scalar_head(model)
    with torch.no_grad():
        noise = torch.randn(head.weight.shape, generator=generator)
        head.weight.copy_(noise / (head.weight.shape[1] + 1) ** 0.5)
        if head.bias is not None:
            head.bias.zero_()
    return model


def _require_scalar_class(config: PreTrainedConfig) -> None:
    own = getattr(config, "auto_map", None) or {}
    if (
        type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        and AutoModelForSequenceClassification.__name__ not in own
    ):
        raise UserError(
            f"transformers has no AutoModelForSequenceClassification for {config.model_type}, which reward model and "
            "critic need; choose another architecture, or functions as scorer and an advantage without a critic"
        )


def scalar_model_of(policy: PreTrainedModel, head: torch.nn.Linear) -> PreTrainedModel:
    """A scalar model with the policy's body (a copy) under the given head: a shared critic as a model of its own."""
    content = {key: value for key, value in policy.config.to_dict().items() if key != "model_type"}
    config = type(policy.config)(**{**content, "num_labels": 1})
    model = AutoModelForSequenceClassification.from_config(config).eval()
    body = getattr(policy, policy.base_model_prefix)
    getattr(model, model.base_model_prefix).load_state_dict(body.state_dict())
    scalar_head(model).load_state_dict(head.state_dict())
    return model


def fresh_head(model: PreTrainedModel) -> torch.nn.Linear:
    """A scalar head for the hidden states that the model's output layer reads, weights 0: every value is 0 before
    training. Raises UserError for an architecture without a scalar model, as which the head is saved."""
    _require_scalar_class(model.config)
    head = torch.nn.Linear(model.get_output_embeddings().weight.shape[1], 1, bias=False)
    torch.nn.init.zeros_(head.weight)
    return head.to(model.device)


def scalar_head(model: PreTrainedModel) -> torch.nn.Linear:
    """The linear layer that turns a hidden state into one number. Raises UserError for an architecture without
    one."""
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise UserError(f"{type(model).__name__}: no linear head named `score`; choose an architecture that has one")
    return head


def keep_float32(head: torch.nn.Module) -> None:
    """Make a head compute in float32 under autocast: eight significant bits are too few for logits and values."""
    inexact = head.forward

    def exact(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            found: Tensor = inexact(hidden.float())
            return found

    head.forward = exact


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration with every dropout rate set to 0: with dropout the first ratio of PPO would not be 1."""
    for key, value in config.to_dict().items():
        if isinstance(value, float) and (key.endswith("pdrop") or "dropout" in key or "layerdrop" in key):
            setattr(config, key, 0.0)
    return config


def context_length(model: PreTrainedModel) -> int:
    """Longest sequence in tokens that the model's positions cover."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31)


def fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the model an embedding for each of the tokenizer's tokens, and its pad token. New ones are drawn from the
    global generator; a model with more embeddings than tokens keeps them."""
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.pad_token_id = tokenizer.pad_token_id


def unique_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's parameters and the buffers that are saved with it, tied ones once."""
    saved = model.state_dict().keys()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name in saved}


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file, atomically."""
    with files.atomic(path) as place:
        save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}, place)


def save_checkpoint(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a Hugging Face folder without the files and keys that differ between equal runs. Raises NonFiniteError for
    weights with NaN or infinity."""
    require_finite(dict(model.named_parameters()), "weights")
    folder.mkdir(parents=True, exist_ok=True)
    weights = None
    if hasattr(model.config, BIAS):
        weights = model.state_dict()
        setattr(model.config, BIAS, weights.pop("score.bias").item())
    model.save_pretrained(folder, state_dict=weights, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    for name in UNSTABLE_FILES:
        (folder / name).unlink(missing_ok=True)
    for name, keys in UNSTABLE_KEYS.items():
        path = folder / name
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            kept = {key: value for key, value in content.items() if key not in keys}
            if "auto_map" in kept:
                kept["auto_map"] = {kind: _beside(folder, place) for kind, place in kept["auto_map"].items()}
            path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _beside(folder: Path, place: Any) -> Any:
    """The name of a custom class without its repository, if its code was saved in the folder."""
    name = place.rpartition("--")[2] if isinstance(place, str) else ""
    return name if name and (folder / f"{name.split('.')[0]}.py").exists() else place


def place(model: PreTrainedModel, device: torch.device | None = None) -> PreTrainedModel:
    """The model for inference, without gradients, on the given device; default: the GPU if there is one."""
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval().requires_grad_(False)
