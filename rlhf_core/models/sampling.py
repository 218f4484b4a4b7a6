"""Our own sampler: batches with a key-value cache, from exactly softmax(logits / temperature).

A sample depends only on the weights, the prompt and its key (seed, step, prompt, sample): not on the batch, the padding
or the other rows. No top-k, top-p or penalties: they would change what is sampled without changing π. The model
folder's generation_config is not read; the caller names the stop tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf_core.determinism import stream
from rlhf_core.errors import UserError
from rlhf_core.models.batch import positions_of
from rlhf_core.models.masked import masked_log_softmax
from rlhf_core.progress import report

Outcome = tuple[list[int], list[float], bool]
"""One response: token ids, their log-probabilities (nats), and whether it ended."""


class SamplingSettings(Protocol):
    """How answers are sampled; the names are those of the parameters."""

    @property
    def temperature(self) -> float: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def stop_tokens(self) -> list[str]: ...


@dataclass(frozen=True)
class Sampled:
    """Responses in the order of the prompts, as token ids, with the engine's own log-probabilities (nats)."""

    responses: list[list[int]]
    logprobs: list[list[float]]
    ended: list[bool]
    """Whether the response closed with a stop token (which it then contains) before the length limit."""


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[tuple[int, ...]],
    *,
    max_new_tokens: int,
    temperature: float,
    stop_ids: frozenset[int],
    pad_id: int,
    batch_size: int,
) -> Sampled:
    """One response for each prompt; `keys[i]` alone decides the randomness of response i.

    `batch_size` rows run side by side, prompts of similar length together; it changes no sample beyond float near-ties.
    """
    order, outcomes = sorted(range(len(prompts)), key=lambda i: len(prompts[i])), dict[int, Outcome]()
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        chosen, their_keys, found = [prompts[i] for i in rows], [keys[i] for i in rows], list[Outcome]()
        states = _decode(model, chosen, their_keys, max_new_tokens, temperature, stop_ids, pad_id)
        for length, found in enumerate(states, start=1):
            drawn = sum(len(tokens) == length for tokens, _, _ in found)
            report("sampling", start + len(rows) * length / max_new_tokens, len(prompts), drawn)
        outcomes |= zip(rows, found, strict=True)
    in_order = [outcomes[i] for i in range(len(prompts))]
    return Sampled([r for r, _, _ in in_order], [p for _, p, _ in in_order], [e for _, _, e in in_order])


@torch.no_grad()
def stream_response(
    model: PreTrainedModel,
    prompt: Sequence[int],
    key: tuple[int, ...],
    *,
    max_new_tokens: int,
    temperature: float,
    stop_ids: frozenset[int],
) -> Iterator[int]:
    """The token ids of one response, each as soon as it is drawn: those of `sample` for the same key, stop token
    included."""
    for [(tokens, _, _)] in _decode(model, [prompt], [key], max_new_tokens, temperature, stop_ids, pad_id=0):
        yield tokens[-1]


def _decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[tuple[int, ...]],
    max_new_tokens: int,
    temperature: float,
    stop_ids: frozenset[int],
    pad_id: int,
) -> Iterator[list[Outcome]]:
    """The responses so far, after each token, of all prompts side by side. Rows leave the batch when they have
    ended."""
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    uniforms = np.stack([stream(*key).random(max_new_tokens) for key in keys])
    running = list(range(len(prompts)))

    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    width = max(map(len, places))
    padded = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in places]
    inputs = torch.tensor(padded, device=model.device)
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in places], device=model.device)
    positions, cache = positions_of(attention), require_cache(model)

    for step in range(max_new_tokens):
        output = model(
            input_ids=inputs,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        distribution = masked_log_softmax(output.logits[:, -1], temperature=temperature)
        if step == 0 and len(places) < len(prompts):  # equal prompts were read once; now each response gets a row
            rows = torch.tensor([places[tuple(prompt)] for prompt in prompts], device=model.device)
            cache.batch_select_indices(rows)
            distribution, attention, positions = distribution[rows], attention[rows], positions[rows]

        drawn = draw(distribution, torch.from_numpy(uniforms[running, step]).to(model.device))
        found = distribution.gather(1, drawn[:, None])[:, 0].tolist()
        for row, token, logprob in zip(running, drawn.tolist(), found, strict=True):
            tokens[row].append(token)
            logprobs[row].append(logprob)
            ended[row] = token in stop_ids
        yield list(zip(tokens, logprobs, ended, strict=True))

        keep = [place for place, row in enumerate(running) if not ended[row]]
        if not keep:
            return
        if len(keep) < len(running):
            rows = torch.tensor(keep, device=model.device)
            cache.batch_select_indices(rows)
            drawn, attention, positions = drawn[rows], attention[rows], positions[rows]
            running = [running[place] for place in keep]
        inputs, positions = drawn[:, None], positions[:, -1:] + 1
        attention = torch.cat([attention, attention.new_ones(len(keep), 1)], dim=1)


def require_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty key-value cache for the model. Raises UserError for an architecture whose cache cannot drop rows, and
    for a configuration of a model's own code that does not describe its layers."""
    try:
        cache = DynamicCache(config=model.config)
    except AttributeError as error:
        raise UserError(
            f"{type(model).__name__}: the sampler cannot make a cache from its configuration ({error}); add what is "
            "missing, or choose another model"
        ) from None
    if not all(hasattr(layer, "batch_select_indices") for layer in cache.layers):
        raise UserError(
            f"{type(model).__name__}: has layers without attention, from whose state the sampler cannot take rows; "
            "choose a model whose layers all have attention"
        )
    return cache


def draw(logprobs: Float[Tensor, "rows vocabulary"], uniforms: Float[Tensor, "rows"]) -> Int[Tensor, "rows"]:
    """Inverse-CDF sampling in float64: the first token id whose cumulative probability passes u · total, for
    log-probabilities in nats and uniforms u in [0, 1)."""
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    threshold = uniforms[:, None].double() * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return chosen.clamp(max=logprobs.shape[-1] - 1)
