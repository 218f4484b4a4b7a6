"""Rollout engines: our own sampler, and a vLLM server for GPUs. Both sample from exactly softmax(logits / temperature)
and ignore the model folder's generation_config, except for its eos tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.errors import UserError
from rlhf_core.models.precision import frozen_dtype
from rlhf_core.models.sampling import Sampled, sample

Key = tuple[int, ...]
Prompts = Sequence[Sequence[int]]


class Engine(Protocol):
    """Samples one response for each prompt from exactly the policy's softmax(logits / temperature)."""

    def __call__(self, policy: PreTrainedModel, prompts: Prompts, keys: Sequence[Key]) -> Sampled:
        """Responses in the order of the prompts (token ids), each with the log-probability of every token (nats).

        `policy` has the current weights: an engine with its own copy updates it in each call. `keys[i]` alone decides
        the randomness of response i (rule 3). A response ends with the first stop token, which it contains, or is cut
        at the length limit and has not `ended`.
        """


@dataclass(frozen=True)
class Rules:
    """The settings of an engine."""

    max_new_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    pad_id: int
    rows: int
    """Largest number of responses in a batch."""


def engine_of(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, stops: frozenset[int], precision: Precision = "float32"
) -> Engine:
    """The engine that the settings name, which stops at the tokens `stops`; `precision` is that of vLLM's copy of the
    weights. Raises UserError for vLLM without a GPU, and where it is not installed."""
    rules = Rules(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        stop_ids=stops,
        pad_id=int(tokenizer.pad_token_id),
        rows=config.sampler_rows or config.batch_size,
    )
    if config.engine == "leash":
        return LeashEngine(rules)
    if not torch.cuda.is_available():
        raise UserError("ppo.engine: vllm needs a CUDA device; use leash here")
    from rlhf_core.ppo import vllm_engine, vllm_server

    vllm_server.program()
    return vllm_engine.VLLMEngine(rules, tokenizer, config.vllm, frozen_dtype(precision))


@dataclass(frozen=True)
class LeashEngine:
    """Our own sampler, with a key-value cache; rows leave the batch when they have ended."""

    rules: Rules

    def __call__(self, policy: PreTrainedModel, prompts: Prompts, keys: Sequence[Key]) -> Sampled:
        """See `Engine`."""
        return sample(
            policy,
            prompts,
            keys,
            max_new_tokens=self.rules.max_new_tokens,
            temperature=self.rules.temperature,
            stop_ids=self.rules.stop_ids,
            pad_id=self.rules.pad_id,
            batch_size=self.rules.rows,
        )
