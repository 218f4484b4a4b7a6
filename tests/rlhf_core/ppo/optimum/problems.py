"""Problems with few enough responses to list them all: a bandit of one-token responses, and all responses of two and
three tokens. Their tokenizers, models and scores, and the user's PPO block with the changes that a small problem
needs."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.data.tokenizer import encode_prompt
from rlhf_core.determinism import stream
from rlhf_core.models.hf import scalar_head, without_dropout

PAD, END = "<|pad|>", "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = "a b"
WIDTH = 32
INITIALIZER_RANGE, EMBEDDING_RANGE = 0.15, 0.5
"""With these, reference probabilities differ by a factor of about ten."""
SPREAD = 1.0
"""Standard deviation of the raw scores in units of β: the optimum is then neither the reference nor one response."""
BATCH_SIZE = 256
"""Responses a step; twice as many where each is used in more than `MANY_UPDATES` optimiser steps."""
MANY_UPDATES = 4
MOST_STEPS, FEWEST_STEPS = 200, 48
"""PPO steps on a problem; fewer where a step has so many optimiser steps that a test would take minutes."""
MOST_OPTIMIZER_STEPS = 800
LEARNING_RATE, CRITIC_LEARNING_RATE = 5e-3, 1e-2

Response = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """All responses of at most `length` tokens from a vocabulary, and a raw score for each."""

    name: str
    vocabulary: int
    """Tokens, with pad and end among them: the policy may sample either."""
    length: int
    unit: float
    """Standard deviation of the raw scores."""
    optimizer_steps: int
    """Optimiser steps that training on it needs, about."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Pad 0, end 1, then one word a token."""
        words = [PAD, END, *(chr(ord("a") + i) for i in range(self.vocabulary - 2))]
        words_only = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=END))
        words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(
            tokenizer_object=words_only, pad_token=PAD, eos_token=END, chat_template=TEMPLATE, padding_side="left"
        )

    @property
    def prompt(self) -> Conversation:
        """The one prompt."""
        return [{"role": "user", "content": PROMPT}]

    @cached_property
    def prompt_ids(self) -> list[int]:
        """Its tokens."""
        return encode_prompt(self.tokenizer, self.prompt)

    @cached_property
    def responses(self) -> list[Response]:
        """Every response: closed by the end token, or cut off at `length`."""
        end = int(self.tokenizer.eos_token_id)
        done: list[Response] = []
        open_: list[Response] = [()]
        for _ in range(self.length):
            longer = [(*prefix, token) for prefix in open_ for token in range(self.vocabulary)]
            done += [response for response in longer if response[-1] == end]
            open_ = [response for response in longer if response[-1] != end]
        return done + open_

    @cached_property
    def scores(self) -> dict[Response, float]:
        """The raw score of each response: normal, mean 0, standard deviation `unit`, the same on every machine."""
        noise = stream(self.vocabulary, self.length).standard_normal(len(self.responses))
        return {response: self.unit * float(z) for response, z in zip(self.responses, noise, strict=True)}

    def __call__(self, answers: Answers) -> Scored:
        """A scorer (`rlhf_core.models.scorers`) that looks the sampled tokens up."""
        return Scored([self.scores[tuple(ids)] for ids in answers.response_ids])


def problems(config: PPOConfig) -> list[Problem]:
    """The three problems, their scores scaled to β (to 1 where β is 0)."""
    unit = SPREAD * (config.kl.coef or 1.0)
    return [
        Problem("bandit", vocabulary=16, length=1, unit=unit, optimizer_steps=200),
        Problem("two_tokens", vocabulary=7, length=2, unit=unit, optimizer_steps=320),
        Problem("three_tokens", vocabulary=5, length=3, unit=unit, optimizer_steps=600),
    ]


def forced(config: PPOConfig, problem: Problem) -> PPOConfig:
    """The user's block with only the changes that a small problem needs: sizes and lengths, learning rates, phases
    counted in steps, names of the user's own tokens or text, no running scale of the score, and on the bandit no
    penalty for a missing end, which all arms but one would get."""
    per_step = config.ppo_epochs * config.minibatches
    fewest = min(FEWEST_STEPS, max(1, MOST_OPTIMIZER_STEPS // per_step))
    steps = min(MOST_STEPS, max(fewest, round(problem.optimizer_steps / per_step)))
    group = math.lcm(config.minibatches, config.samples_per_prompt)
    batch_size = math.ceil(BATCH_SIZE * (2 if per_step > MANY_UPDATES else 1) / group) * group
    tenth = steps // 10
    changes: dict[str, Any] = {
        "steps": steps,
        "batch_size": batch_size,
        "micro_batch_size": batch_size,
        "learning_rate": LEARNING_RATE,
        "micro_batch_tokens": None,
        "processes": 1,
        "engine": "leash",
        "max_new_tokens": problem.length,
        "stop_tokens": [],
        "ptx": {"coef": 0.0},
        "policy_gradient_steps": min(config.policy_gradient_steps, tenth),
        "kl": {"horizon": max(config.kl.horizon, batch_size)},
        "critic": {
            "learning_rate": CRITIC_LEARNING_RATE,
            "warmup_steps": min(config.critic.warmup_steps, tenth),
        },
        "optimizer": {"warmup_steps": min(config.optimizer.warmup_steps, tenth)},
    }
    if config.lora is not None:
        changes["lora"] = {"target_modules": "all-linear"}
    changes["score"] = {"missing_eos_penalty": 0.0} if problem.length == 1 else {}
    return PPOConfig.model_validate(merged(config.model_dump(), changes))


def merged(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `changes`, block by block."""
    result = dict(values)
    for key, value in changes.items():
        result[key] = merged(result.get(key) or {}, value) if isinstance(value, Mapping) else value
    return result


def nested(flattened: Mapping[str, Any]) -> dict[str, Any]:
    """{"kl.coef": 1} as {"kl": {"coef": 1}}."""
    result: dict[str, Any] = {}
    for key, value in flattened.items():
        *above, last = key.split(".")
        block = result
        for part in above:
            block = block.setdefault(part, {})
        block[last] = value
    return result


def build_models(problem: Problem) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random policy and a critic with values 0, of one layer each."""
    config = GPT2Config(
        vocab_size=problem.vocabulary,
        n_embd=WIDTH,
        n_layer=1,
        n_head=2,
        n_positions=16,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(problem.length)
    policy = GPT2LMHeadModel(without_dropout(config))
    scalar = copy.deepcopy(config)
    scalar.num_labels = 1
    critic = GPT2ForSequenceClassification(scalar)
    for model in (policy, critic):
        for embedding in (model.transformer.wte, model.transformer.wpe):
            torch.nn.init.normal_(embedding.weight, std=EMBEDDING_RANGE)
    torch.nn.init.zeros_(scalar_head(critic).weight)
    return policy, critic
