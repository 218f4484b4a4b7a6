"""What the benchmarks of speed train: settings, models, prompts and pairs. The models are those of a finished demo, or
have random weights and the architecture of SmolLM2-135M."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.data.tokenizer import encode_prompt, load_tokenizer
from rlhf_core.models.hf import load_causal_lm, load_scalar_model, map_scalar, place
from rlhf_core.models.scorers import RewardModelScorer
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.scoring import RewardSource, ScoreNormalisation, reference_scores
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.reward import Comparison

SFT, REWARD = "sft", "reward"
"""Folders of the policy (and its reference), and of the reward model, where the critic starts, too."""
PROMPTS, PAIRS = "data/ingest/ppo_prompts.jsonl", "data/preferences/preferences.jsonl"
RATE = 1e-6
"""Learning rate: small, so that the lengths of the answers, and with them the work, stay what they are."""
SMOLLM2_135M: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "num_labels": 1,
}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").strip().split("\n")]


def write_random_models(folder: Path, tokenizer: Path) -> Path:
    """SmolLM2-135M's architecture with random weights, as language and as reward model, with the tokenizer of another
    model; written once. Its prompts use a part of the vocabulary, its answers all of it."""
    if not (folder / REWARD / "config.json").exists():
        for name, kind in ((SFT, AutoModelForCausalLM), (REWARD, AutoModelForSequenceClassification)):
            torch.manual_seed(1)
            kind.from_config(LlamaConfig(**SMOLLM2_135M)).save_pretrained(folder / name)
            load_tokenizer(tokenizer).save_pretrained(folder / name)
    return folder


def ppo_settings(batch: int, micro_batch: int, epochs: int, longest: int, **changes: Any) -> dict[str, Any]:
    """The block `ppo` for so many answers a step and a pass, epochs, and tokens of the longest answer; `changes`
    replace settings."""
    return {
        "steps": 100,
        "batch_size": batch,
        "minibatches": 1,
        "micro_batch_size": micro_batch,
        "micro_batch_tokens": 2048,
        "ppo_epochs": epochs,
        "learning_rate": RATE,
        "vf_coef": 0.1,
        "lam": 0.95,
        "max_new_tokens": longest,
        "kl": {"coef": 0.05},
        "critic": {"learning_rate": RATE, "warmup_steps": 0},
        "optimizer": {"betas": [0.9, 0.999], "eps": 1e-8, "warmup_steps": 0, "decay": "none"},
        "score": {"normalise": False, "clip": 1e9, "missing_eos_penalty": 1.0},
    } | changes


def ppo_trainer(
    models: Path, prompts: Path, settings: Mapping[str, Any], seed: int = 1, precision: Precision = "float32"
) -> PPOTrainer:
    """The trainer as the stage `ppo` builds it, on a folder of models and a JSONL file with a `prompt` in each row."""
    tokenizer = load_tokenizer(models / SFT)
    config = PPOConfig.model_validate(settings)
    rows = [row["prompt"] for row in read_rows(prompts)]
    frozen = "bfloat16" if precision == "bfloat16" and config.lora is not None else "float32"
    scorer = place(load_scalar_model(models / REWARD, frozen=precision))
    pad_id, eos_id = int(tokenizer.pad_token_id), int(tokenizer.eos_token_id)
    rewards = RewardModelScorer(scorer, pad_id, eos_id, config.micro_batch_size)
    reference = None if config.lora is not None else place(load_causal_lm(models / SFT))
    normalisation = ScoreNormalisation(0.0, 1.0)
    if config.score.normalise and reference is not None:
        normalisation = reference_scores(config, reference, tokenizer, rewards, rows, seed).normalisation
    critic = load_scalar_model(models / REWARD) if config.needs_critic_model else None
    if critic is not None:
        map_scalar(critic, *normalisation.unit(config.score))
    policy = load_causal_lm(models / SFT, frozen=frozen)
    actors = ActorCritic(config, policy, reference, critic, precision=precision)
    return PPOTrainer(config, actors, tokenizer, RewardSource(rewards, normalisation), rows, seed)


def comparisons(models: Path, pairs: Path, prompts: int) -> list[Comparison]:
    """All pairs of the first training prompts, as they were sampled: each distinct answer once."""
    tokenizer, found = load_tokenizer(models / SFT), {}
    for row in pair_rows(pairs, prompts):
        one = found.setdefault(row["prompt_id"], Comparison(encode_prompt(tokenizer, row["prompt"]), [], []))
        sides = [row[f"{side}_ids"] for side in ("chosen", "rejected")]
        one.responses.extend(ids for ids in sides if ids not in one.responses)
        one.pairs.append((one.responses.index(sides[0]), one.responses.index(sides[1])))
    return list(found.values())


def pair_rows(pairs: Path, prompts: int) -> list[dict[str, Any]]:
    """The rows of the first training prompts in a file of preferences."""
    rows = [row for row in read_rows(pairs) if row["split"] == "train"]
    chosen = list(dict.fromkeys(row["prompt_id"] for row in rows))[:prompts]
    return [row for row in rows if row["prompt_id"] in set(chosen)]
