"""Hugging Face models: building, loading, saving to equal bytes, and scalar models (reward model, critic), which output
one number a token instead of logits."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
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
from rlhf_core.config.precision import Frozen
from rlhf_core.data.tokenizer import end_ids
from rlhf_core.errors import UserError
from rlhf_core.finite import require_finite
from rlhf_core.loading import load_config, loading
from rlhf_core.models.precision import frozen_dtype, keep_float32
from rlhf_core.models.quantised import detach_quantizer, nf4_options
from rlhf_core.progress import report

BIAS = "score_bias"
"""The key of config.json with the bias of a head that has none in its architecture; only `load_classifier` reads
it."""
WRAPPERS = {r"^(?:module\.|_orig_mod\.)+|_orig_mod\.": ""}
"""What DistributedDataParallel and torch.compile add to the names of weights: patterns and what replaces them."""
HEADS = {r"^(?:value_head|v_head\.summary|v_head)\.": "score."}
"""The same for the names of a scalar head in OpenRLHF and TRL."""
OF_SCORES = re.compile(r"(?:score|classifier|critic|(?:value|reward|regression)_head)\.")
"""Heads of models that are no language models."""
OF_POLICY = "v_head."
"""The value head that a policy of TRL keeps."""
BUFFERS = re.compile(r"(?:inv_freq|masked_bias|causal_mask|position_ids|embed_positions|attn\.bias|attention\.bias)$")
"""Tensors of older versions of transformers that can be computed: masks and positions."""
Log = Callable[[str], None]

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
    path: str | Path,
    revision: str | None = None,
    *,
    trust_remote_code: bool = False,
    frozen: Frozen = "float32",
    device: torch.device | None = None,
    log: Log = print,
) -> PreTrainedModel:
    """A causal language model, dropout off, from a folder (safetensors only) or a hub id at a revision.

    Args:
        path: the folder or the hub id.
        revision: of the hub id.
        trust_remote_code: lets the folder's own Python code run.
        frozen: the precision of a model that is not trained; its logits are float32 in every precision. A model that
            is trained is loaded in float32.
        device: where the weights are loaded to, without a copy on the host; None: the CPU.
        log: called with what was renamed, and which tensors of the folder were not read.

    Raises UserError for weights that are missing, have another shape or no place, for a reward model, and see
    `loading`.
    """
    with loading(path):
        config = without_dropout(load_config(path, revision, trust_remote_code))
        kind = AutoModelForCausalLM
        model, unread = _weights(kind, path, config, revision, trust_remote_code, frozen, device, log, WRAPPERS)
    _log_unread(path, unread, log)
    if frozen != "float32":
        keep_float32(model.get_output_embeddings())
    return model


def load_scalar_model(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    frozen: Frozen = "float32",
    device: torch.device | None = None,
    log: Log = print,
) -> PreTrainedModel:
    """A reward model or critic, dropout off, its head in float32; arguments as of `load_causal_lm`. Raises UserError
    when the folder has no scalar head, and as `load_causal_lm`."""
    with loading(path):
        outputs = load_config(path, None, trust_remote_code).num_labels
    if outputs != 1:
        raise UserError(f"{path}: expected one output a token, the model has {outputs}")
    model = load_classifier(path, trust_remote_code=trust_remote_code, frozen=frozen, device=device, log=log)
    scalar_head(model)
    return model


def load_classifier(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    frozen: Frozen = "float32",
    device: torch.device | None = None,
    log: Log = print,
) -> PreTrainedModel:
    """A model that classifies sequences, with any number of outputs, dropout off, its head `score`, if it has one, in
    float32; arguments and errors as of `load_causal_lm`."""
    with loading(path):
        config = without_dropout(load_config(path, None, trust_remote_code))
        _require_scalar_class(config)
        kind = AutoModelForSequenceClassification
        table = WRAPPERS | HEADS
        model, unread = _weights(kind, path, config, None, trust_remote_code, frozen, device, log, table)
        head, bias = getattr(model, "score", None), getattr(config, BIAS, None)
        if isinstance(head, torch.nn.Linear):
            saved = _head_in(Path(path), model.base_model_prefix)
            if frozen != "float32":  # the head was rounded with the body
                head.float().load_state_dict({name: saved[name] for name in head.state_dict()})
            if head.bias is None and "bias" in saved:
                if saved["bias"].numel() != 1:
                    raise UserError(
                        f"{path}: the scalar head has {saved['bias'].numel()} biases, not one; save it again"
                    )
                bias = saved["bias"].item()
                unread = [name for name in unread if not name.endswith("score.bias")]
    _log_unread(path, unread, log)
    if bias is not None:
        map_scalar(model, 1.0, bias)
    return model


def last_layer(model: PreTrainedModel) -> torch.nn.Linear | None:
    """The linear layer behind the body that makes a classifier's outputs; None where there is none."""
    body = {id(layer) for layer in model.base_model.modules()}
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear) and id(layer) not in body]
    return next((layer for layer in reversed(layers) if layer.out_features == model.config.num_labels), None)


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
    kind: Any,
    path: str | Path,
    config: PreTrainedConfig,
    revision: str | None,
    trust_remote_code: bool,
    frozen: Frozen,
    device: torch.device | None,
    log: Log,
    table: Mapping[str, str],
    fresh_head: bool = False,
) -> tuple[PreTrainedModel, list[str]]:
    """A model, and the tensors of the folder that it has no place for. The one place that decides on dtype and device
    of a loaded model; `device_map` loads tensor by tensor.

    `table`: names of weights are changed by these patterns where weights are missing else. `fresh_head`: a scalar head
    may be missing. Raises UserError for missing weights, for those of another shape, for those of the model's own
    modules that are not read, and for a reward model as a language model.
    """

    report(f"loading {'/'.join(Path(path).parts[-2:])}", 0, 1)

    def load(**renaming: Any) -> tuple[PreTrainedModel, Mapping[str, Any]]:
        model, found = kind.from_pretrained(
            str(path),
            revision=revision,
            config=config,
            dtype=frozen_dtype(frozen),
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            device_map=None if device is None or device.type == "cpu" else {"": device},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **renaming,
            **(nf4_options() if frozen == "nf4" else {}),
        )
        ties = model.get_expanded_tied_weights_keys(all_submodels=True)
        if untied := sorted(ties.keys() - model.all_tied_weights_keys.keys()):  # transformers has only warned
            raise UserError(
                f"{path}: {untied[0]} differs from {ties[untied[0]]}, and config.json ties them; write "
                "tie_word_embeddings: false there to keep both, or remove one"
            )
        return model, found

    model, found = load()
    missing, unread = set(found["missing_keys"]), sorted(found["unexpected_keys"])
    renamed = {name: new for name in unread if (new := _renamed(name, table)) != name}
    if missing and renamed and frozen != "nf4" and _are_new(model, missing, list(renamed.values())):
        repaired, found = load(key_mapping=table)
        if not found["missing_keys"] and not found["mismatched_keys"]:
            copy_weights(repaired, model)  # `repaired` itself would be saved under the names of the folder
            old = next(iter(renamed))
            log(f"{path}: weights renamed: {old} is {renamed[old]}, and {len(renamed) - 1} more")
            missing, unread = set(), sorted(found["unexpected_keys"])
    if kind is AutoModelForCausalLM:
        refuse_scores(path, config, _scalar_heads(path, model, unread))
    if fresh_head:
        missing = {name for name in missing if not name.startswith("score.")}
    if missing:
        raise UserError(
            f"{path}: weights are missing ({_some(missing)})"
            + (f", and others have no place in {type(model).__name__} ({_some(unread)})" if unread else "")
            + "; transformers would draw them at random: save the whole model with save_pretrained, unwrapped"
        )
    if found["mismatched_keys"]:
        name, shape, wanted = min(found["mismatched_keys"])
        raise UserError(
            f"{path}: {name} has the shape {tuple(shape)}, and by config.json {tuple(wanted)}; correct config.json, or "
            "save the model again"
        )
    if left := [name for name in unread if _is_of_own_module(model, name)]:
        raise UserError(
            f"{path}: weights of its own layers are not read ({_some(left)}), because config.json describes a model "
            "without them; correct config.json, or save the model again"
        )
    return (detach_quantizer(model) if frozen == "nf4" else model), unread


def refuse_scores(path: str | Path, config: PreTrainedConfig, heads: Sequence[str] = ()) -> None:
    """Raise UserError for a reward model or critic: a folder with such tensors, or of such a class."""
    classes = [str(name) for name in config.architectures or () if str(name).endswith("ForSequenceClassification")]
    if found := [*heads, *classes]:
        raise UserError(
            f"{path}: has a head for scores ({found[0]}): it is a reward model or a critic, not a language model, and "
            "gives scores, not words; name the language model that it was made from, such as models/policy"
        )


def _scalar_heads(path: str | Path, model: PreTrainedModel, unread: Sequence[str]) -> list[str]:
    """Those of the tensors that turn a hidden state into one number: by name, or, in a folder, by shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(Path(path)) if unread else []:
        shapes |= shapes_in(file)

    def is_head(name: str) -> bool:
        stem, shape = _stem(model, name), shapes.get(name, ())
        one_row = len(shape) == 2 and shape[0] == 1 and stem.count(".") < 3 and not _is_of_own_module(model, name)
        return not stem.startswith(OF_POLICY) and bool(OF_SCORES.match(stem) or one_row)

    return [name for name in unread if is_head(name)]


def _is_of_own_module(model: PreTrainedModel, name: str) -> bool:
    """Whether a tensor belongs to a module that the model has, other than a scalar head."""
    modules = [*model.named_children(), *model.base_model.named_children()]
    own = {child for child, _ in modules} - {"score"}
    return _stem(model, name).split(".")[0] in own and not BUFFERS.search(name)


def _stem(model: PreTrainedModel, name: str) -> str:
    """The name of a tensor within the model's body, without wrappers."""
    return _renamed(name, WRAPPERS).removeprefix(f"{model.base_model_prefix}.")


def _renamed(name: str, table: Mapping[str, str]) -> str:
    for pattern, new in table.items():
        name = re.sub(pattern, new, name)
    return name


def _are_new(model: PreTrainedModel, missing: set[str], renamed: list[str]) -> bool:
    """Whether the names are different and none of a weight that the folder has without renaming."""
    prefix = f"{model.base_model_prefix}."
    there = {name.removeprefix(prefix) for name in model.state_dict().keys() - missing}
    return len({name.removeprefix(prefix) for name in renamed} - there) == len(renamed)


def _some(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    first, *more = sorted(names)
    return ", ".join([first, *more[:2]]) + (f" and {len(more) - 2} more" if len(more) > 2 else "")


def _log_unread(path: str | Path, unread: list[str], log: Log) -> None:
    if unread:
        log(f"{path}: not read, because the model has no place for them: {_some(unread)}")


def _head_in(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Weight and bias of the scalar head in a folder, as they were saved. A head that is called `score` (or, as the
    body, `prefix`.score) comes before one of another name. Raises UserError where there is no weight."""
    found: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                stem = name.removeprefix(f"{prefix}.")
                renamed = _renamed(stem, WRAPPERS | HEADS).removeprefix(f"{prefix}.")
                if renamed.startswith("score."):
                    found[renamed == stem][renamed.removeprefix("score.")] = file.get_tensor(name)
    head = found["weight" in found[True]]
    if "weight" not in head:
        raise UserError(f"{folder}: the weight of the scalar head is not in its safetensors files; save it again")
    return head


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads; an adapter may be beside them."""
    single = folder / "model.safetensors"
    return [single] if single.exists() else sorted(folder.glob("model*.safetensors"))


def scalar_model_from(
    path: str | Path,
    seed: int,
    *,
    trust_remote_code: bool = False,
    frozen: Frozen = "float32",
    device: torch.device | None = None,
    log: Log = print,
) -> PreTrainedModel:
    """The body of the model at `path` under a fresh scalar head in float32, see `draw_head`. Arguments and errors as of
    `load_causal_lm`; `frozen` for a body below adapters."""
    with loading(path):
        config = without_dropout(load_config(path, None, trust_remote_code, num_labels=1))
        _require_scalar_class(config)
        kind = AutoModelForSequenceClassification
        model, _ = _weights(kind, path, config, None, trust_remote_code, frozen, device, log, {}, fresh_head=True)
    draw_head(scalar_head(model).float(), seed)
    return model


@torch.no_grad()
def draw_head(head: torch.nn.Linear, seed: int) -> None:
    """Weights N(0, 1/(d+1)) (Stiennon et al. 2020), drawn on the CPU; bias 0."""
    generator = torch.Generator().manual_seed(seed)
    head.weight.copy_(torch.randn(head.weight.shape, generator=generator) / (head.weight.shape[1] + 1) ** 0.5)
    if head.bias is not None:
        head.bias.zero_()


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


def require_scalar_head(config: PreTrainedConfig) -> None:
    """Raise UserError for an architecture whose sequence classifier has no scalar head that reads the last token."""
    _require_scalar_class(config)
    with torch.device("meta"):
        scalar_head(AutoModelForSequenceClassification.from_config(config))


def scalar_model_of(policy: PreTrainedModel, head: torch.nn.Linear) -> PreTrainedModel:
    """A scalar model with the policy's own body, not a copy, under the given head."""
    left_out = ("model_type", "id2label", "label2id")
    content = {key: value for key, value in policy.config.to_dict().items() if key not in left_out}
    with torch.device("meta"):
        config = type(policy.config)(**{**content, "num_labels": 1})
        model = AutoModelForSequenceClassification.from_config(config)
    model.config._attn_implementation = policy.config._attn_implementation
    setattr(model, model.base_model_prefix, getattr(policy, policy.base_model_prefix))
    scalar_head(model)
    model.score = head
    return model.eval()


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


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration with every dropout rate set to 0: with dropout the first ratio of PPO would not be 1."""
    for key, value in config.to_dict().items():
        if isinstance(value, float) and (key.endswith("pdrop") or "dropout" in key or "layerdrop" in key):
            setattr(config, key, 0.0)
    return config


def context_length(model: PreTrainedModel) -> int:
    """Longest sequence in tokens that the model's positions cover."""
    return context_of(model.config)


def context_of(config: PreTrainedConfig) -> int:
    """Longest sequence in tokens that the positions of such a model cover."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31)


def fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the model an embedding for each of the tokenizer's tokens, its pad token, and its eos token beside those
    control tokens that end the model's answers already. New embeddings are drawn from the global generator; a model
    with more embeddings than tokens keeps them."""
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    settings = getattr(model, "generation_config", None)  # a model of its own code may lack it
    ends = end_ids(tokenizer, settings, model.config)
    model.config.pad_token_id, model.config.eos_token_id = tokenizer.pad_token_id, int(tokenizer.eos_token_id)
    if settings is not None:
        settings.pad_token_id = tokenizer.pad_token_id
        write_ends(model, tokenizer, ends)


def write_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> None:
    """Name the tokens that end answers in the model's generation_config, the tokenizer's eos first."""
    eos = int(tokenizer.eos_token_id)
    others = sorted(set(ends) - {eos})
    model.generation_config.eos_token_id = [eos, *others] if others else eos


def unique_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's parameters and the buffers that are saved with it, tied ones once."""
    saved = model.state_dict().keys()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if name in saved}


def save_weights(path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Write tensors to a safetensors file, atomically; with `dtype` floating-point ones in that type. On a CPU nothing
    is copied but what changes its type."""
    kept = {name: _saved(tensor.detach(), dtype) for name, tensor in weights.items()}
    with files.atomic(path) as place:
        save_file(kept, place)


def _saved(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor on the CPU with a storage of its own."""
    found = tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
    return found.clone() if found.untyped_storage().nbytes() > found.nbytes else found


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a safetensors file, without reading them."""
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@torch.no_grad()
def load_weights(path: Path, into: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a safetensors file into those of the same names, one at a time. Raises KeyError for a name
    that `into` lacks."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            into[name].copy_(file.get_tensor(name))


@torch.no_grad()
def copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give a model the weights of another one of its shapes. Raises KeyError for another architecture."""
    weights = unique_weights(target)
    for name, tensor in unique_weights(source).items():
        weights[name].copy_(tensor)


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


def trainable(model: PreTrainedModel) -> PreTrainedModel:
    """The model with gradients for all its weights but those in 4 bits, which have none."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return model


def default_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def place(model: PreTrainedModel, device: torch.device | None = None) -> PreTrainedModel:
    """The model for inference, without gradients, on the given device; default: the GPU if there is one."""
    return model.to(device or default_device()).eval().requires_grad_(False)
