"""The trainers of `gpu_check.py`: models with random weights, of real sizes on a GPU and of toy size on a CPU, a small
tokenizer and prompts of random tokens. Nothing is read or downloaded."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gpu_check import Case
from setups import ppo_settings
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Frozen, Precision
from rlhf_core.data.tokenizer import train_bpe
from rlhf_core.determinism import make_deterministic
from rlhf_core.models.hf import place
from rlhf_core.models.precision import body_precision, frozen_dtype, keep_float32
from rlhf_core.models.quantised import detach_quantizer, nf4_options
from rlhf_core.models.scorers import RewardModelScorer
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.scoring import RewardSource, ScoreNormalisation
from rlhf_core.ppo.trainer import PPOTrainer

SEED = 1
STEPS = 2
"""PPO steps of a check; the first is a warm-up where speed is measured."""
FIRST_TOKEN = 300
"""Random prompts use the token ids from here on: behind the control tokens, and behind the tokenizer's whole
vocabulary, which is smaller than the models'."""

SHAPES: dict[str, tuple[type, dict[str, Any]]] = {
    "0.5B": (
        Qwen2Config,  # Qwen2.5-0.5B
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "1.5B": (
        Qwen2Config,  # Qwen2.5-1.5B
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "8B": (
        LlamaConfig,  # Llama-3-8B
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
        },
    ),
}
TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Work:
    """The batch of a PPO step."""

    batch: int
    prompt: int
    """Longest prompt, in tokens; the shortest has half as many."""
    response: int
    """Longest response, in tokens; about a third of them is that long."""
    micro_batch_tokens: int


GPU_WORK, TOY_WORK = Work(64, 256, 128, 4096), Work(8, 16, 12, 128)


def build(case: Case) -> PPOTrainer:
    """The trainer of a case, on the GPU if there is one."""
    gpu = torch.cuda.is_available()
    work, device = (GPU_WORK, "cuda") if gpu else (TOY_WORK, "cpu")
    precision, deterministic = precision_of(case), case.changes.get("deterministic", True)
    make_deterministic(SEED, threads=1, deterministic=deterministic, tf32=precision == "bfloat16")
    config = PPOConfig.model_validate(values_of(case, work))
    tokenizer = small_tokenizer(work)
    body = body_precision(precision, config.lora)
    policy = random_model(case.model, AutoModelForCausalLM, device, 1, body)
    reference = random_model(case.model, AutoModelForCausalLM, device, 2, body) if config.lora is None else None
    critic = (
        random_model(case.model, AutoModelForSequenceClassification, device, 3, body)
        if config.needs_critic_model
        else None
    )
    vocabulary = policy.config.vocab_size
    reward = random_model(
        case.reward or case.model, AutoModelForSequenceClassification, device, 4, precision, vocab_size=vocabulary
    )
    pad_id, eos_id = int(tokenizer.pad_token_id), int(tokenizer.eos_token_id)
    scorer = RewardModelScorer(place(reward), pad_id, eos_id, config.micro_batch_size)
    prompts = random_prompts(work, vocabulary)
    trainer = PPOTrainer(
        config,
        ActorCritic(config, policy, reference, critic, SEED, precision),
        tokenizer,
        RewardSource(scorer, ScoreNormalisation(0.0, 1.0)),
        [[{"role": "user", "content": str(place_)}] for place_ in range(len(prompts))],
        SEED,
    )
    trainer.prompt_ids = prompts
    engine: Any = trainer.engine
    trainer.stop_ids = frequent_stops(work, vocabulary)  # random weights sample them often enough
    trainer.engine = replace(engine, rules=replace(engine.rules, stop_ids=trainer.stop_ids))
    return trainer


OF_ALL_STAGES = ("precision", "deterministic")
"""Settings that are not of the block `ppo`."""


def precision_of(case: Case) -> Precision:
    """The precision of a case."""
    precision: Precision = case.changes.get("precision", "float32")
    return precision


def values_of(case: Case, work: Work) -> dict[str, Any]:
    """The block `ppo` of a case: the settings of `setups.py` for this batch, with the changes of the case."""
    changes = {"steps": STEPS, "micro_batch_tokens": work.micro_batch_tokens, "minibatches": 2, "check_ratio": False}
    values = ppo_settings(work.batch, work.batch // 2, 1, work.response, **changes)
    for key, value in case.changes.items():
        if key in OF_ALL_STAGES:
            continue
        values[key] = {**(values.get(key) or {}), **value} if isinstance(value, Mapping) else value
    return values


def frequent_stops(work: Work, vocabulary: int) -> frozenset[int]:
    """One token in `work.response` ends a response, so that a third of them is cut off at the limit."""
    return frozenset(range(FIRST_TOKEN, vocabulary, work.response))


def small_tokenizer(work: Work) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer, trained on one line; it writes text for the samples and encodes nothing."""
    return train_bpe(["a text"], FIRST_TOKEN - 1, "<|pad|>", "<|end|>", work.prompt + work.response)


def random_prompts(work: Work, vocabulary: int) -> list[list[int]]:
    """Prompts for all steps, each used once."""
    draw = random.Random(SEED)
    lengths = [draw.randint(work.prompt // 2, work.prompt) for _ in range(STEPS * work.batch)]
    return [[draw.randrange(FIRST_TOKEN, vocabulary) for _ in range(length)] for length in lengths]


def config_of(shape: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of the policy, or of a model of its shape."""
    kind, sizes = SHAPES[shape]
    config: PreTrainedConfig = kind(**(sizes | changes), pad_token_id=0, eos_token_id=1, bos_token_id=None)
    return config


def random_model(
    shape: str, kind: Any, device: str, seed: int, frozen: Frozen = "float32", **changes: Any
) -> PreTrainedModel:
    """A model with random weights, made on the device, its head in float32; of toy size on a CPU."""
    config = config_of(shape, **((TOY if device == "cpu" else {}) | changes), num_labels=1)
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = kind.from_config(config, dtype=frozen_dtype(frozen)).eval()
    if frozen == "nf4":
        model = in_four_bits(model, kind, device)
    if (head := getattr(model, "score", None)) is not None:
        head.float()
    elif frozen != "float32":
        keep_float32(model.get_output_embeddings())
    return model


def in_four_bits(model: PreTrainedModel, kind: Any, device: str) -> PreTrainedModel:
    """The model with 4-bit weights, which are made while a folder is loaded."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded: PreTrainedModel = kind.from_pretrained(
            folder, dtype=model.dtype, device_map=None if device == "cpu" else {"": 0}, **nf4_options()
        )
    return detach_quantizer(loaded).eval()
