"""Tiny models, a tiny tokenizer and a tiny PPO run, shared by the tests of `rlhf_core`. Nothing is downloaded.

The models have two layers of width 32 and large random weights, so that a wrong position or a leaking padding token
changes their outputs visibly.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.data.tokenizer import CHAT_TEMPLATE, ROLES
from rlhf_core.ppo.actor_critic import ActorCritic
from rlhf_core.ppo.scoring import RewardSource, ScoreNormalisation
from rlhf_core.ppo.trainer import PPOTrainer
from rlhf_core.training.run import Run

PAD, END = "<|pad|>", "<|end|>"
VOCABULARY = 60
CONTEXT = 64
SENTENCES = ("what shall i eat for breakfast", "eat some oats and an egg", "take tea and a fig with yogurt, then rest")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny models are fastest on one thread, and results then do not depend on the machine's cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of 60 tokens of small letters: pad 0, end 1, roles 2 to 4. Each test may change its
    own."""
    return deepcopy(_trained_tokenizer())


@cache
def _trained_tokenizer() -> PreTrainedTokenizerBase:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [PAD, END, *ROLES]
    bpe.train_from_iterator(
        SENTENCES * 3, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="left",
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of 60 tokens of small letters: pad 0, end 1, roles 2 to 4."""
    return tiny_tokenizer()


def _gpt2(size: dict[str, Any], dropout: float) -> PretrainedConfig:
    names = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    return GPT2Config(**size, **names, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)


def _rotary(kind: type[PretrainedConfig], **extra: Any) -> Callable[[dict[str, Any], float], PretrainedConfig]:
    names = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}

    def config(size: dict[str, Any], dropout: float) -> PretrainedConfig:
        return kind(**size, **names, **extra, max_position_embeddings=CONTEXT, attention_dropout=dropout)

    return config


ARCHITECTURES: dict[str, Callable[[dict[str, Any], float], PretrainedConfig]] = {
    "gpt2": _gpt2,
    "llama": _rotary(LlamaConfig, num_key_value_heads=4, tie_word_embeddings=True),
    "qwen2": _rotary(Qwen2Config, num_key_value_heads=2),
    "qwen3": _rotary(Qwen3Config, num_key_value_heads=2, head_dim=8),
}

Build = Callable[..., PreTrainedModel]


def _config(kind: str, dropout: float) -> PretrainedConfig:
    size = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 1}
    config = ARCHITECTURES[kind](size, dropout)
    config.bos_token_id = None
    return config


@pytest.fixture(params=list(ARCHITECTURES))
def kind(request: pytest.FixtureRequest) -> str:
    """Absolute positions (GPT-2) and rotary ones (the others), with and without grouped keys."""
    return str(request.param)


def tiny_lm(kind: str = "llama", seed: int = 0, dropout: float = 0.0) -> PreTrainedModel:
    """A random causal language model, in eval mode."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(_config(kind, dropout)).eval()


def tiny_scalar(kind: str = "llama", seed: int = 0, dropout: float = 0.0) -> PreTrainedModel:
    """A random model with one output a token, in eval mode."""
    torch.manual_seed(seed)
    config = _config(kind, dropout)
    config.num_labels = 1
    return AutoModelForSequenceClassification.from_config(config).eval()


@pytest.fixture(scope="session")
def build_lm() -> Build:
    """build_lm(kind="llama", seed=0, dropout=0.0) -> a random causal language model, in eval mode."""
    return tiny_lm


@pytest.fixture(scope="session")
def build_scalar() -> Build:
    """build_scalar(kind="llama", seed=0) -> a random model with one output a token, in eval mode."""
    return tiny_scalar


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """make_run("name", **fields) -> a Run with a state folder of that name."""

    def make(name: str = "state", **fields: Any) -> Run:
        return Run(**{"state_dir": tmp_path / name, "seed": 3, "report": lambda *_: None, **fields})

    return make


PPO: dict[str, Any] = {
    "steps": 4,
    "batch_size": 8,
    "minibatches": 2,
    "micro_batch_size": 3,
    "ppo_epochs": 2,
    "learning_rate": 1e-3,
    "clip_ratio": 0.2,
    "vf_coef": 0.5,
    "entropy_coef": 0.01,
    "gamma": 1.0,
    "lam": 0.95,
    "temperature": 1.0,
    "max_new_tokens": 7,
    "whiten_advantages": True,
    "kl": {"coef": 0.1, "controller": "fixed", "target": 1.0, "horizon": 40},
    "critic": {"init": "reward", "learning_rate": 2e-3, "value_clip": 0.3, "clip_value": True, "warmup_steps": 0},
    "optimizer": {"betas": [0.9, 0.95], "eps": 1e-5, "warmup_steps": 1, "decay": "linear", "max_grad_norm": 1.0},
    "score": {"normalise": True, "clip": 5.0, "missing_eos_penalty": 1.0},
    "sample_every": 10,
}


def tiny_ppo_values(**changes: Any) -> dict[str, Any]:
    """The block `ppo` as in params.yaml, with these keys changed."""
    merged = deepcopy(PPO)
    for key, value in changes.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged


@pytest.fixture
def ppo_values() -> Callable[..., dict[str, Any]]:
    """ppo_values(steps=2, kl={"coef": 0.0}) -> the block `ppo` with these keys changed."""
    return tiny_ppo_values


def tiny_prompts() -> list[Conversation]:
    """Ten prompts of different lengths."""
    words = ["what", "shall", "i", "eat", "for", "breakfast", "then", "rest", "with", "tea"]
    return [[{"role": "user", "content": " ".join(words[: i + 1])}] for i in range(len(words))]


@pytest.fixture(scope="session")
def prompts() -> list[Conversation]:
    """Ten prompts of different lengths."""
    return tiny_prompts()


def token_share(answers: Answers) -> list[float]:
    """The share of token 10 in each answer: a reward that anything can learn."""
    return [sum(token == 10 for token in ids) / len(ids) for ids in answers.response_ids]


def tiny_trainer(
    kind: str = "llama",
    seed: int = 5,
    judge: Any = None,
    scorer: Any = token_share,
    normalisation: tuple[float, float] = (0.0, 0.1),
    same_reference: bool = False,
    text: Sequence[list[int]] = (),
    precision: Any = "float32",
    **config: Any,
) -> PPOTrainer:
    """A PPOTrainer on tiny models. Equal arguments give equal trainers. `scorer` gives a list of numbers."""
    settings = PPOConfig(**tiny_ppo_values(**config))
    models = ActorCritic(
        settings,
        policy=tiny_lm(kind, seed=1),
        reference=tiny_lm(kind, seed=1 if same_reference else 2) if settings.lora is None else None,
        critic=tiny_scalar(kind, seed=3) if settings.needs_critic_model else None,
        seed=seed,
        precision=precision,
    )
    return PPOTrainer(
        settings,
        models,
        tokenizer=tiny_tokenizer(),
        source=RewardSource(lambda answers: Scored(scorer(answers)), ScoreNormalisation(*normalisation), judge),
        prompts=tiny_prompts(),
        seed=seed,
        text=text,
    )


@pytest.fixture
def make_trainer() -> Callable[..., PPOTrainer]:
    """make_trainer(kind="llama", seed=5, judge=None, scorer=…, normalisation=(mean, std), same_reference=False,
    text=(), **config) -> a PPOTrainer on tiny models."""
    return tiny_trainer


@pytest.fixture
def says_pad() -> Callable[[PPOTrainer], PPOTrainer]:
    """says_pad(trainer) -> the same trainer, whose policy now often samples the pad token."""

    def change(trainer: PPOTrainer) -> PPOTrainer:
        frequent = Counter(token for ids in trainer.rollout().response_ids for token in ids).most_common(1)[0][0]
        with torch.no_grad():
            weight = trainer.models.policy.get_output_embeddings().weight
            weight[trainer.pad_id] = 2 * weight[frequent]
        return trainer

    return change
