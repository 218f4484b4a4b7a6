"""Our own sampler: batches with a key-value cache, from exactly softmax(logits / temperature).

A sample depends only on the weights, the prompt and its key (seed, step, prompt, sample): not on the batch, the padding
or the other rows. No top-k, top-p or penalties: they would change what is sampled without changing π. The model
folder's generation_config is not read; the caller names the stop tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf_core.determinism import stream
from rlhf_core.errors import UserError
from rlhf_core.models.batch import positions_of
from rlhf_core.models.batching import in_length_order
from rlhf_core.models.masked import masked_log_softmax
from rlhf_core.models.packed import can_pack
from rlhf_core.models.static_decoding import StaticDecoder, suits

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
    static: bool | None = None,
) -> Sampled:
    """One response for each prompt; `keys[i]` alone decides the randomness of response i.

    `batch_size` rows run side by side, prompts of similar length together; it changes no sample beyond float near-ties.
    Nor does `static`: decoding with arrays of fixed size (`StaticDecoder`); the default is on CUDA, for a model that it
    supports.
    """
    if static is None:
        static = suits(model)

    def decode(rows: list[int]) -> list[Outcome]:
        decoder = _Decoder(
            model, [prompts[i] for i in rows], [keys[i] for i in rows], max_new_tokens, temperature, pad_id
        )
        return decoder.run_static(stop_ids) if static else decoder.run(stop_ids)

    return in_batches(prompts, batch_size, decode)


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
    decoder = _Decoder(model, [prompt], [key], max_new_tokens, temperature, pad_id=0)
    for _ in decoder.steps(stop_ids):
        yield decoder.responses[0][-1]


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


def in_batches(
    prompts: Sequence[Sequence[int]], batch_size: int, decode: Callable[[list[int]], list[Outcome]]
) -> Sampled:
    """What `decode` makes of the prompts at the given places, `batch_size` at a time, similar lengths together."""
    outcomes = in_length_order([len(prompt) for prompt in prompts], batch_size, decode)
    return Sampled([r for r, _, _ in outcomes], [p for _, p, _ in outcomes], [e for _, _, e in outcomes])


def left_padded(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Int[Tensor, "rows width"], Int[Tensor, "rows width"]]:
    """Token ids and attention mask, as wide as the longest prompt."""
    width = max(len(p) for p in prompts)
    ids = [[pad_id] * (width - len(p)) + list(p) for p in prompts]
    attention = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids, device=device), torch.tensor(attention, device=device)


class _Decoder:
    """The state of one batch: the rows that still run, their cache, and the tokens of every row so far."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[tuple[int, ...]],
        max_new_tokens: int,
        temperature: float,
        pad_id: int,
    ) -> None:
        self.model, self.temperature = model, temperature
        distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        self.copied_from = [distinct[tuple(prompt)] for prompt in prompts]
        self.tokens, self.attention = left_padded(list(distinct), pad_id, model.device)
        self.positions = positions_of(self.attention)
        self.cache = require_cache(model)
        self.uniforms = np.stack([stream(*key).random(max_new_tokens) for key in keys])
        self.running = list(range(len(prompts)))
        self.responses: list[list[int]] = [[] for _ in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.ended = [False] * len(prompts)

    def run(self, stop_ids: frozenset[int]) -> list[Outcome]:
        """Every row to its first stop token or the length limit."""
        for _ in self.steps(stop_ids):
            pass
        return list(zip(self.responses, self.logprobs, self.ended, strict=True))

    def run_static(self, stop_ids: frozenset[int]) -> list[Outcome]:
        """The same, with arrays of fixed size. Raises ValueError for a model that `can_pack` does not hold for."""
        if not can_pack(self.model):
            raise ValueError(f"{type(self.model).__name__} cannot decode with arrays of fixed size; use static=False")
        first = self._read_prompts()
        uniforms = torch.from_numpy(self.uniforms)
        last = self.positions[:, -1:]
        return StaticDecoder(
            self.model, self.cache, self.attention, last, uniforms, first, self.temperature, stop_ids, draw
        ).run()

    def steps(self, stop_ids: frozenset[int]) -> Iterator[None]:
        """At each turn, one token more for every row that still runs."""
        logprobs = self._read_prompts()
        for place, uniforms in enumerate(self.uniforms.T):
            if place:
                logprobs = self._next_logprobs()
            chosen = self._choose(logprobs, uniforms[self.running])
            keep = self._record(chosen, stop_ids)
            yield
            if not keep:
                break
            self._advance(chosen, keep)

    def _read_prompts(self) -> Tensor:
        """Equal prompts are read once; then each response gets a row of its own."""
        logprobs = self._next_logprobs()
        if len(logprobs) == len(self.copied_from):
            return logprobs
        index = torch.tensor(self.copied_from, device=logprobs.device)
        self._select(index)
        return logprobs[index]

    def _next_logprobs(self) -> Tensor:
        output = self.model(
            input_ids=self.tokens,
            attention_mask=self.attention,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return masked_log_softmax(output.logits[:, -1], temperature=self.temperature)

    def _choose(self, logprobs: Tensor, uniforms: np.ndarray) -> Tensor:
        chosen = draw(logprobs, torch.from_numpy(uniforms).to(logprobs.device))
        picked = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        for row, logprob in zip(self.running, picked, strict=True):
            self.logprobs[row].append(logprob)
        return chosen

    def _record(self, chosen: Tensor, stop_ids: frozenset[int]) -> list[int]:
        """Append the tokens; return the places (in the running batch) of the rows that continue."""
        keep = []
        for place, (row, token) in enumerate(zip(self.running, chosen.tolist(), strict=True)):
            self.responses[row].append(token)
            if token in stop_ids:
                self.ended[row] = True
            else:
                keep.append(place)
        return keep

    def _advance(self, chosen: Tensor, keep: list[int]) -> None:
        """Drop the finished rows, and make the chosen tokens the next input."""
        if len(keep) < len(self.running):
            index = torch.tensor(keep, device=chosen.device)
            self._select(index)
            self.running = [self.running[place] for place in keep]
            chosen = chosen[index]
        self.tokens = chosen[:, None]
        self.attention = torch.cat([self.attention, self.attention.new_ones(len(keep), 1)], dim=1)
        self.positions = self.positions[:, -1:] + 1

    def _select(self, index: Tensor) -> None:
        """Make these rows the batch, in this order; a row may occur more than once."""
        self.cache.batch_select_indices(index)
        self.attention, self.positions = self.attention[index], self.positions[index]


def draw(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling in float64: the first token whose cumulative probability passes u · total.

    logprobs [rows, V] in nats, uniforms [rows] in [0, 1); returns token ids [rows].
    """
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    threshold = uniforms[:, None].double() * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return chosen.clamp(max=logprobs.shape[-1] - 1)
