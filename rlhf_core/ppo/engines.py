"""Rollout engines: our own sampler and `generate` of transformers; others have modules of their own. All sample from
exactly softmax(logits / temperature) and ignore the model folder's generation_config, except for its eos tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.precision import Precision
from rlhf_core.determinism import stream
from rlhf_core.errors import UserError
from rlhf_core.models.masked import masked_log_softmax
from rlhf_core.models.precision import frozen_dtype
from rlhf_core.models.sampling import Sampled, draw, in_batches, left_padded, sample

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

    def cut(self, tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[list[int], list[float], bool]:
        """A response up to its first stop token, and whether there is one."""
        for place, token in enumerate(tokens):
            if token in self.stop_ids:
                return list(tokens[: place + 1]), list(logprobs[: place + 1]), True
        return list(tokens), list(logprobs), False


def engine_of(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, stops: frozenset[int], precision: Precision = "float32"
) -> Engine:
    """The engine that the settings name, which stops at the tokens `stops`; `precision` is that of vLLM's copy of the
    weights. Raises UserError for continuous batching or vLLM without a GPU, and for vLLM where it is not installed."""
    rules = Rules(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        stop_ids=stops,
        pad_id=int(tokenizer.pad_token_id),
        rows=config.sampler_rows or config.batch_size,
    )
    if config.engine == "leash":
        return LeashEngine(rules)
    if config.engine == "transformers":
        return TransformersEngine(rules)
    if not torch.cuda.is_available():
        raise UserError(f"ppo.engine: {config.engine} needs a CUDA device; use leash or transformers here")
    if config.engine == "vllm":
        from rlhf_core.ppo import vllm_engine, vllm_server

        vllm_server.program()
        return vllm_engine.VLLMEngine(rules, tokenizer, config.vllm, frozen_dtype(precision))
    from rlhf_core.ppo.continuous import ContinuousEngine

    return ContinuousEngine(rules)


@dataclass(frozen=True)
class LeashEngine:
    """Our own sampler, with a key-value cache; rows leave the batch when they have ended."""

    rules: Rules
    static: bool | None = None
    """Whether the cache has a fixed size, see `sample`."""

    def __call__(self, policy: PreTrainedModel, prompts: Prompts, keys: Sequence[Key]) -> Sampled:
        """See `Engine`."""
        rules = self.rules
        return sample(
            policy,
            prompts,
            keys,
            max_new_tokens=rules.max_new_tokens,
            temperature=rules.temperature,
            stop_ids=rules.stop_ids,
            pad_id=rules.pad_id,
            batch_size=rules.rows,
            static=self.static,
        )


@dataclass(frozen=True)
class TransformersEngine:
    """`generate` of transformers, with each token chosen by the row's key; ended rows continue as padding."""

    rules: Rules

    @torch.no_grad()
    def __call__(self, policy: PreTrainedModel, prompts: Prompts, keys: Sequence[Key]) -> Sampled:
        """See `Engine`. The same keys give the same responses as `LeashEngine` does, float near-ties aside."""
        return in_batches(
            prompts,
            self.rules.rows,
            lambda rows: self._generate(policy, [prompts[i] for i in rows], [keys[i] for i in rows]),
        )

    def _generate(
        self, policy: PreTrainedModel, prompts: Prompts, keys: Sequence[Key]
    ) -> list[tuple[list[int], list[float], bool]]:
        rules = self.rules
        ids, attention = left_padded(prompts, rules.pad_id, policy.device)
        choice = KeyedChoice(keys, rules.max_new_tokens, rules.temperature)
        with blank_generation_config(policy):
            policy.generate(
                input_ids=ids,
                attention_mask=attention,
                logits_processor=LogitsProcessorList([choice]),
                generation_config=GenerationConfig(
                    do_sample=False,
                    num_beams=1,
                    max_new_tokens=rules.max_new_tokens,
                    eos_token_id=sorted(rules.stop_ids) or None,
                    pad_token_id=rules.pad_id,
                    use_cache=True,
                ),
            )
        return [rules.cut(tokens, logprobs) for tokens, logprobs in zip(*choice.recorded(), strict=True)]


class KeyedChoice(LogitsProcessor):
    """Draws each row's next token with the row's key, and makes it the only possible one for `generate`. No other
    logits processor may come before it."""

    def __init__(self, keys: Sequence[Key], max_new_tokens: int, temperature: float) -> None:
        self.uniforms = np.stack([stream(*key).random(max_new_tokens) for key in keys])
        self.temperature = temperature
        self.tokens: list[Tensor] = []
        self.logprobs: list[Tensor] = []

    def __call__(
        self, input_ids: Int[Tensor, "rows time"], scores: Float[Tensor, "rows vocabulary"]
    ) -> Float[Tensor, "rows vocabulary"]:
        """0 for the drawn token of each row, −∞ for the others."""
        logprobs = masked_log_softmax(scores, temperature=self.temperature)
        uniforms = torch.from_numpy(self.uniforms[:, len(self.tokens)]).to(logprobs.device)
        chosen = draw(logprobs, uniforms)
        self.tokens.append(chosen)
        self.logprobs.append(logprobs.gather(1, chosen[:, None])[:, 0])
        return torch.full_like(scores, float("-inf")).scatter(1, chosen[:, None], 0.0)

    def recorded(self) -> tuple[list[list[int]], list[list[float]]]:
        """The tokens and log-probabilities (nats) of each row, ended or not."""
        return torch.stack(self.tokens, dim=1).tolist(), torch.stack(self.logprobs, dim=1).tolist()


@contextmanager
def blank_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Without the folder's generation_config, from which `generate` takes settings that the caller does not give."""
    of_the_folder = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = of_the_folder
