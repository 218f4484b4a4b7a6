"""Peak memory of the phases of each stage, by formula from the shapes of a model. Every row has its longest length."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from rlhf_core.config.dpo import PairConfig
from rlhf_core.config.lora import LoraSettings
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.config.reward import RewardConfig
from rlhf_core.config.sft import SFTConfig
from rlhf_core.dpo import PROMPTS
from rlhf_core.errors import UserError
from rlhf_core.models import batching, head, token_logprobs
from rlhf_core.models.sampling import require_cache
from rlhf_core.models.sharding import layers_of

ACTIVATIONS, LOGITS, CACHE = "activations", "logits", "key-value cache"
WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED = "weights", "gradients", "optimizer", "gathered"
FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configurations."""

Bytes = Counter[tuple[str, str]]
"""Bytes by kind and model; the model is "" for tensors of a pass."""


def _require_class(kind: Any, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    own_code = trust_remote_code and kind.__name__ in (getattr(config, "auto_map", None) or {})
    if type(config) not in kind._model_mapping and not own_code:
        raise UserError(f"{config.model_type}: transformers has no {kind.__name__} for this architecture")


@dataclass(frozen=True)
class Model:
    """The sizes of a causal language model, in numbers (not bytes), and what it is planned for."""

    parameters: int
    layers: int
    layer: int
    """Parameters of a layer."""
    linear: dict[str, int]
    """Inputs plus outputs of each linear layer of the body, by name."""
    products: int
    """Weights of these layers: what each token is multiplied with, apart from the output layer."""
    vocabulary: int
    hidden: int
    intermediate: int
    queries: int
    """Heads times their size."""
    keys: int
    """The same of keys, and of values."""
    tied: bool
    """Whether the output layer's weights are those of the embedding."""
    normed: bool
    """Whether queries and keys are normalised."""
    precision: Precision = "float32"
    accelerator: bool = False

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        trust_remote_code: bool = False,
        precision: Precision = "float32",
        accelerator: bool = False,
    ) -> "Model":
        """The sizes of a configuration, from a model without weights. Raises UserError for an architecture that is no
        causal language model or has no scalar model, for layers without attention, and for experts: how many tokens
        each one gets depends on weights."""
        found = config.get_text_config()
        if any((getattr(found, key, None) or 0) > 1 for key in EXPERTS):
            raise UserError(
                f"{config.model_type}: has experts, which cannot be planned, because the weights choose them; plan a "
                "model without experts"
            )
        _require_class(AutoModelForCausalLM, config, trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        require_cache(model)
        _require_class(AutoModelForSequenceClassification, config, trust_remote_code)
        prefix, output = f"{model.base_model_prefix}.", model.get_output_embeddings()
        linear = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and name.startswith(prefix)
        }
        heads = found.num_attention_heads
        size = getattr(found, "head_dim", None) or found.hidden_size // heads
        layers = layers_of(model)
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            layers=len(layers),
            layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
            linear={name: sum(module.weight.shape) for name, module in linear.items()},
            products=sum(module.weight.numel() for module in linear.values()),
            vocabulary=output.weight.shape[0],
            hidden=output.weight.shape[1],
            intermediate=max(m.weight.shape[isinstance(m, nn.Linear)] for m in linear.values()),
            queries=heads * size,
            keys=(getattr(found, "num_key_value_heads", None) or heads) * size,
            tied=output.weight is model.get_input_embeddings().weight,
            normed=any(name.endswith("q_norm") for name, _ in model.named_modules()),
            precision=precision,
            accelerator=accelerator,
        )

    @property
    def head(self) -> int:
        """Weights of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def scalar(self) -> int:
        """Parameters of a reward model or critic with this body."""
        return self.parameters - (0 if self.tied else self.head) + self.hidden

    def trained(self, lora: LoraSettings | None, scalar: bool = False) -> int:
        """Parameters that a training changes. Raises UserError for adapters of layers that the body does not have."""
        if lora is None:
            return self.scalar if scalar else self.parameters
        ends = ("",) if lora.target_modules == "all-linear" else tuple(f".{name}" for name in lora.target_modules)
        for end in ends:
            if not any(name.endswith(end) for name in self.linear):
                raise UserError(f"lora.target_modules: the model has no layer {end[1:]}")
        adapters = lora.rank * sum(size for name, size in self.linear.items() if name.endswith(ends))
        return adapters + self.hidden * scalar

    def size(self, lora: LoraSettings | None, frozen: bool = False) -> int:
        """Bytes of a weight of the body: a trained one is float32 in every precision."""
        if lora is not None and lora.quantize != "none":
            raise UserError(
                "lora.quantize: nf4 is not planned; plan with none: 4 bits take a quarter of the body's bfloat16 bytes"
            )
        return BFLOAT16 if self.precision == "bfloat16" and (frozen or lora is not None) else FLOAT32

    @property
    def float32_head(self) -> int:
        """Bytes of the float32 copy of a bfloat16 output layer."""
        return FLOAT32 * self.head if self.precision == "bfloat16" else 0

    @property
    def chunk(self) -> int:
        """Tokens whose logits are computed at once."""
        return max(1, (head.CHUNK_ON_ACCELERATOR if self.accelerator else head.CHUNK_ON_CPU) // self.vocabulary)

    def rows_per_pass(self, lengths: "Lengths") -> int:
        """Rows of the longest length in a pass that is limited by tokens."""
        tokens = batching.TOKENS_ON_ACCELERATOR if self.accelerator else batching.TOKENS_ON_CPU
        return max(1, tokens // lengths.whole)

    def logits(self, tokens: int, work: str) -> int:
        """Bytes of the logits that live at once in the `work` on these tokens: to `read` log-probabilities, to
        `compare` two models, or to `train`."""
        piece = token_logprobs.PIECE_ON_ACCELERATOR if self.accelerator else token_logprobs.PIECE_ON_CPU
        rows = min(tokens, self.chunk)
        part = min(rows, max(1, piece // self.vocabulary))
        several = rows < tokens
        live = {  # chunks and pieces; with several chunks those of the one before live, too
            "read": (2, 1) if several else (1, 2),
            "compare": (4, 3) if several else (2, 5),
            "train": (3, 2) if several else (2, 1 + (part < rows)),
        }
        chunks, pieces = live[work]
        return FLOAT32 * self.vocabulary * (chunks * rows + pieces * part)

    def kept(self, lora: LoraSettings | None, spread: float = 1.0) -> float:
        """Bytes of activations that one layer keeps of a token for the backward pass. `spread`: attention reads so many
        tokens for each distinct one."""
        size = BFLOAT16 if self.precision == "bfloat16" else FLOAT32
        # Inputs of both norms and their normalised values (float32; frozen norms keep no normalised ones), and the
        # inputs of the linear layers behind them, of which bfloat16 has a copy for each cast. Adapters of weights in
        # bfloat16 need no cast; peft's of those in 4 bits do.
        stream = 26 if size == BFLOAT16 else 24
        if lora is not None:
            stream -= 14 if size == BFLOAT16 and lora.quantize == "none" else 8
        # Queries, keys and values by row, the output of attention, and the input of the layer behind it.
        attention = 2 * spread * (self.queries + self.keys) + self.queries
        # The gate, its activation, the other factor, and their product.
        numbers = attention + 4 * self.intermediate
        norms = (4 + size) * (self.queries + self.keys) * self.normed
        adapters = 2 * size * lora.rank * len(self.linear) / self.layers if lora is not None else 0
        return stream * self.hidden + size * numbers + norms + adapters

    def passing(self, frozen: bool) -> int:
        """Bytes of a token in a layer without a backward pass, at the most: in its feed-forward part or its attention.
        The residual stream of `frozen` bfloat16 weights is bfloat16. The factors were counted on Llama."""
        size = BFLOAT16 if self.precision == "bfloat16" else FLOAT32
        narrow = frozen and size == BFLOAT16
        forward = 3 * size * self.intermediate + (8 if narrow else 16 if size == BFLOAT16 else 18) * self.hidden
        queries, keys = (20, 16) if size == FLOAT32 else (10, 8) if narrow else (14, 12)
        return max(forward, (8 if narrow else 12) * self.hidden + queries * self.queries + keys * self.keys)

    def copies(self, lora: LoraSettings | None, divided: bool = False) -> int:
        """Bytes of the bfloat16 copies that autocast keeps of trained float32 weights. FSDP gathers in bfloat16."""
        return BFLOAT16 * self.products if lora is None and self.precision == "bfloat16" and not divided else 0

    def gathered(self, size: int, scalar: bool = False, whole: bool = False, trains: bool = False) -> int:
        """Bytes that a divided model gathers: `whole`, or in a pass the weights outside the layers, of `size` bytes
        each, and two layers; if it `trains`, also the gradients of these weights and of one layer, and the float32 copy
        that is sent. Layers are gathered in the precision of the run."""
        layer = self.layer * (BFLOAT16 if self.precision == "bfloat16" else FLOAT32)
        root = (self.scalar if scalar else self.parameters) - self.layers * self.layer
        gradients = FLOAT32 * root + layer + FLOAT32 * self.layer if trains else 0
        return size * root + (self.layers if whole else 2) * layer + gradients


@dataclass(frozen=True)
class Lengths:
    """The longest rows, in tokens."""

    prompt: int
    response: int

    @property
    def whole(self) -> int:
        """Prompt and response."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Phase:
    """A phase of a stage at its peak."""

    name: str
    parts: Bytes

    @property
    def peak(self) -> int:
        """Bytes."""
        return sum(self.parts.values())


def _phase(name: str, resident: Bytes, *moments: dict[str, float]) -> Phase:
    """The phase at that moment that needs most beside what is resident."""
    most = max(moments, key=lambda moment: sum(moment.values()))
    parts = resident + Counter({(kind, ""): round(size) for kind, size in most.items()})
    return Phase(name, Counter({part: size for part, size in parts.items() if size}))


def _reading(
    name: str,
    model: Model,
    resident: Bytes,
    rows: int,
    lengths: Lengths,
    work: str = "",
    *,
    answers: int = 1,
    frozen: bool = True,
    casts: int = 0,
    copies: int = 0,
) -> Phase:
    """Passes without gradient over `rows` responses, `answers` of which have one prompt. Most memory is needed in a
    layer, or by the logits (see `Model.logits`), for which `casts` bfloat16 output layers are copied to float32."""
    tokens = -(-rows // answers) * lengths.prompt + rows * lengths.response
    responses = rows * lengths.response
    states = FLOAT32 * model.hidden * responses + casts * model.float32_head
    kept = 0 if work == "compare" else copies  # PPO leaves autocast before it compares
    return _phase(
        name,
        resident,
        {ACTIVATIONS: copies + tokens * model.passing(frozen)},
        {ACTIVATIONS: kept + states, LOGITS: model.logits(responses, work)} if work else {},
    )


def _training(
    model: Model,
    resident: Bytes,
    config: SFTConfig | RewardConfig | PairConfig | PPOConfig,
    gradients: int,
    accumulates: bool,
    rows: int,
    lengths: Lengths,
    logits: int = 0,
    *,
    answers: int = 1,
    early: int = 0,
    divided: bool = False,
) -> Phase:
    """An optimizer step with passes of `rows` responses, `answers` of which have one prompt; `early` of the bytes of
    the gradients are there before the first pass. Most memory is needed before the backward pass through the layers, in
    the last layer (above all where it is recomputed), or at the end, when all gradients are there."""
    lora, again = config.lora, model.layers // int(config.gradient_checkpointing or model.layers + 1)
    tokens = -(-rows // answers) * lengths.prompt + rows * lengths.response
    layer = tokens * model.kept(lora, rows * lengths.whole / tokens)
    layers = (model.layers - again) * layer + again * tokens * model.size(lora) * model.hidden
    copies, states = model.copies(lora, divided), tokens * FLOAT32 * model.hidden
    kept = layers + 3 * states + (0 if again else copies)
    head = FLOAT32 * model.head if logits and (lora is None or model.float32_head) else 0  # its gradient, or its copy
    begun = {GRADIENTS: gradients if accumulates else early}
    return _phase(
        "update",
        resident,
        begun | {ACTIVATIONS: kept + head + FLOAT32 * rows * lengths.response * model.hidden, LOGITS: logits},
        begun | {ACTIVATIONS: kept + 4 * states + (layer + copies if again else 0) + head * (not accumulates)},
        {GRADIENTS: gradients, ACTIVATIONS: layer + (FLOAT32 * model.head if lora is None else 0)},
    )


def _held(model: Model, name: str, lora: LoraSettings | None, scalar: bool = False, processes: int = 1) -> Bytes:
    """Weights and moments of a trained model, of one process."""
    trained, whole = model.trained(lora, scalar), model.scalar if scalar else model.parameters
    weights = model.size(lora) * whole + (FLOAT32 * trained if lora is not None else 0)
    return Counter({(WEIGHTS, name): weights // processes, (OPTIMIZER, name): 2 * FLOAT32 * trained // processes})


def sft_phases(model: Model, config: SFTConfig, lengths: Lengths) -> list[Phase]:
    """SFT: a training step, and the validation loss."""
    lora, processes = config.lora, config.processes
    rows, divided = min(config.micro_batch_size, model.rows_per_pass(lengths)), processes > 1
    held, size = _held(model, "policy", lora, processes=processes), model.size(lora)
    gathered = {True: model.gathered(size, whole=True) * divided, False: model.gathered(size, trains=True) * divided}
    update = _training(
        model, held + Counter({(GATHERED, "policy"): gathered[False]}), config,
        FLOAT32 * model.trained(lora) // processes, config.batch_size > rows * processes, rows, lengths,
        model.logits(rows * lengths.response, "train"), divided=divided,
    )  # fmt: skip
    validation = _reading(
        "validation", model, held + Counter({(GATHERED, "policy"): gathered[True]}), rows, lengths, "read",
        frozen=lora is not None, casts=int(lora is not None), copies=model.copies(lora, divided),
    )  # fmt: skip
    return [update, validation]


def reward_phases(model: Model, config: RewardConfig, lengths: Lengths, answers: int) -> list[Phase]:
    """The reward model: a training step, and held-out pairs where those are read with more weights."""
    return _pair_phases(model, config, lengths, answers, answers * config.batch_size, scalar=True)


def pair_phases(model: Model, config: PairConfig, lengths: Lengths, answers: int) -> list[Phase]:
    """DPO or IPO: log π_ref of the responses, a training step, and held-out pairs as in `reward_phases`."""
    lora, divided = config.lora, config.processes > 1
    weights = model.size(lora) * model.parameters
    resident: Bytes = Counter({(WEIGHTS, "policy"): weights // config.processes})
    resident[GATHERED, "policy"] = model.gathered(model.size(lora), whole=True) * divided
    reference = _reading(
        "reference", model, resident, min(PROMPTS * answers, model.rows_per_pass(lengths)), lengths, "read",
        answers=answers, frozen=lora is not None, casts=int(lora is not None), copies=model.copies(lora, divided),
    )  # fmt: skip
    return [reference, *_pair_phases(model, config, lengths, answers, PROMPTS * answers, scalar=False)]


def _pair_phases(
    model: Model, config: RewardConfig | PairConfig, lengths: Lengths, answers: int, heldout: int, scalar: bool
) -> list[Phase]:
    """A training step in passes over prompts with `answers` responses each, of at most `config.micro_batch_tokens`.
    After the training of a divided model or of adapters, `heldout` responses with whole float32 weights; any other
    training needs more memory itself."""
    lora, processes, name = config.lora, config.processes, "reward model" if scalar else "policy"
    divided = processes > 1
    tokens = min(config.micro_batch_tokens, lengths.whole * model.rows_per_pass(lengths))
    prompts = max(1, min(-(-config.batch_size // processes), tokens // (lengths.prompt + answers * lengths.response)))
    rows = answers * prompts
    logits = 0 if scalar else model.logits(rows * lengths.response, "train")
    held = _held(model, name, lora, scalar, processes)
    held[GATHERED, name] = model.gathered(model.size(lora), scalar, trains=True) * divided
    update = _training(
        model, held, config, FLOAT32 * model.trained(lora, scalar) // processes,
        prompts * processes < config.batch_size, rows, lengths, logits, answers=answers, divided=divided,
    )  # fmt: skip
    if lora is None and not divided:
        return [update]
    whole: Bytes = Counter({(WEIGHTS, name): FLOAT32 * (model.scalar if scalar else model.parameters)})
    rows, work = min(heldout, model.rows_per_pass(lengths)), "" if scalar else "read"
    return [update, _reading("held-out pairs", model, whole, rows, lengths, work, answers=answers, frozen=False)]


def cache_bytes(model: Model, rows: int, tokens: int, size: int = FLOAT32) -> int:
    """Keys and values of `rows` sequences of `tokens` in all layers, of `size` bytes a number."""
    return 2 * model.layers * model.keys * rows * tokens * size


def _sampling(
    model: Model, resident: Bytes, rows: int, lengths: Lengths, each: int, frozen: bool, copies: int = 0
) -> Phase:
    """Our sampler draws `rows` responses side by side, `each` to a prompt: most memory is needed when the prompts are
    read, or at the last token. Under autocast the cache is float32."""
    size, prompts = model.size(None, frozen), -(-rows // each)
    last, logits = cache_bytes(model, rows, lengths.whole - 1, size), FLOAT32 * rows * model.vocabulary
    head = model.float32_head * frozen
    reading = copies + prompts * lengths.prompt * model.passing(frozen)
    return _phase(
        "sampling",
        resident,
        {ACTIVATIONS: reading, CACHE: cache_bytes(model, prompts, lengths.prompt, size)},
        {ACTIVATIONS: head + last / (2 * model.layers), LOGITS: logits, CACHE: last},
        {LOGITS: 7 * logits, CACHE: last},  # probabilities and their sums in float64
    )


def sampler_phases(model: Model, rows: int, lengths: Lengths, each: int) -> list[Phase]:
    """Sampling from one model that is not trained."""
    weights = model.size(None, frozen=True) * model.parameters
    return [_sampling(model, Counter({(WEIGHTS, "policy"): weights}), rows, lengths, each, frozen=True)]


def evaluate_phases(
    model: Model, rows: int, lengths: Lengths, each: int, scorers: int, interpolates: bool
) -> list[Phase]:
    """Sampling from a candidate, and the exact KL to the SFT model. In memory are both, with `interpolates` a policy
    between them, too, and the reward models that score."""
    size = model.size(None, frozen=True)
    names = ["candidate", "SFT model"] + ["interpolated"] * interpolates
    resident: Bytes = Counter({(WEIGHTS, name): size * model.parameters for name in names})
    resident[WEIGHTS, "reward model"] = scorers * size * model.scalar
    together = min(rows, model.rows_per_pass(lengths))
    kl = _reading("exact KL", model, resident, together, lengths, "compare", casts=2)
    return [_sampling(model, resident, rows, lengths, each, frozen=True), kl]


def ppo_phases(
    model: Model, config: PPOConfig, lengths: Lengths, scorers: int, reward_lora: LoraSettings | None = None
) -> list[Phase]:
    """A PPO step of one process after the first, which made the optimizers' state: sampling, log-probabilities and
    values, scoring, update. `scorers` reward models score; `reward_lora`: they were trained as these adapters."""
    lora, separate = config.lora, config.needs_critic_model
    divided = config.processes if config.sharding == "fsdp" else 1
    size, frozen = model.size(lora), model.size(None, frozen=True)
    policy, bodies = model.trained(lora), {"policy": size}  # bytes of a weight
    held, trained = _held(model, "policy", lora), policy
    if lora is None:  # the reference's linear layers are rounded to bfloat16, unless it is divided
        rounded = (size - frozen) * model.products if divided == 1 else 0
        held[WEIGHTS, "reference"] = size * model.parameters - rounded
        bodies["reference"] = size
    if config.reference_ema is not None:
        held[WEIGHTS, "moving reference"] = FLOAT32 * policy
    if separate:
        adapter = lora if config.critic.init == "sft" else reward_lora
        on_policy = lora is not None and adapter is not None
        number = model.trained(adapter if on_policy else lora, scalar=True)
        held += _held(model, "critic", adapter if on_policy else lora, scalar=True)
        if on_policy:
            held[WEIGHTS, "critic"] = FLOAT32 * number
        else:
            bodies["critic"] = size
        trained += number
    elif config.has_critic:
        held += {(WEIGHTS, "critic"): FLOAT32 * model.hidden, (OPTIMIZER, "critic"): 2 * FLOAT32 * model.hidden}
        trained += model.hidden
    scoring_body = lora is None or reward_lora is None
    each = frozen * model.scalar if scoring_body else FLOAT32 * model.trained(reward_lora, scalar=True)
    held[WEIGHTS, "reward model"] = scorers * each
    held = Counter({part: n // divided for part, n in held.items()})

    def gathering(names: dict[str, int], whole: bool = False, trains: bool = False) -> Bytes:
        sizes: Bytes = Counter()
        for name, bytes_ in names.items() if divided > 1 else ():
            with_gradients = trains and lora is None and name != "reference"
            sizes[GATHERED, name] = model.gathered(bytes_, name in ("critic", "reward model"), whole, with_gradients)
        return held + sizes

    answers = -(-config.batch_size // config.processes)
    minibatch = max(1, -(-answers // config.minibatches))
    micro = min(config.micro_batch_size, minibatch)
    if config.micro_batch_tokens is not None:
        micro = max(1, min(micro, config.micro_batch_tokens // lengths.whole))
    copies = model.copies(lora, divided > 1)
    update = _training(
        model, gathering(bodies, trains=True), config, FLOAT32 * trained // divided, minibatch > micro, micro, lengths,
        model.logits(micro * lengths.response, "train"), early=FLOAT32 * (trained - policy) // divided,
        divided=divided > 1,
    )  # fmt: skip
    read = _reading(
        "log-probabilities", model, gathering(bodies), micro, lengths, "compare",
        frozen=lora is not None, casts=1, copies=copies,
    )  # fmt: skip
    rows = min(answers, config.sampler_rows or config.batch_size)
    gathered = gathering({"policy": size}, whole=True)
    same_prompt = min(config.samples_per_prompt, rows)
    sampling = _sampling(model, gathered, rows, lengths, same_prompt, lora is not None, copies)
    if not scorers:
        return [sampling, read, update]
    scoring = gathering({"reward model": frozen}, whole=True) if scoring_body else gathered
    together = min(micro, model.rows_per_pass(lengths))
    return [sampling, read, _reading("scoring", model, scoring, together, lengths), update]
