"""Decoding for an accelerator: arrays of fixed size for keys, values and results, and no value read by the host between
two stop tests, so that a step can be replayed as a CUDA graph. Not run on a GPU."""

import warnings
from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rlhf_core.determinism import fast_kernels
from rlhf_core.models.masked import masked_log_softmax
from rlhf_core.models.packed import can_pack
from rlhf_core.models.sharding import is_divided

Draw = Callable[[Tensor, Tensor], Tensor]
"""Log-probabilities [rows, V] and uniforms [rows] to token ids [rows]."""
STOP_TEST = 16
"""Tokens between two stop tests: each waits for the device once."""
WARM_UP = 2
"""Steps that are computed before the first is recorded as a graph: libraries allocate their memory in them."""
Decoding = Literal["graph", "static", "plain"]
OF_ROWS = ("tokens", "positions", "mask", "uniforms", "responses", "logprobs", "ended")

_decoded: WeakKeyDictionary[PreTrainedModel, Decoding] = WeakKeyDictionary()
_not_recorded: WeakSet[PreTrainedModel] = WeakSet()
"""Models whose step could not be recorded: each attempt costs time, and would fail again."""


def suits(model: PreTrainedModel) -> bool:
    """Whether the model decodes this way unless told otherwise: on CUDA, with full attention and a mask of ours."""
    return model.device.type == "cuda" and can_pack(model)


def decoding_of(model: PreTrainedModel) -> Decoding:
    """How the model was decoded so far: with replayed graphs, with arrays of fixed size only, or not by this module."""
    return _decoded.get(model, "plain")


class FixedLayer(DynamicLayer):
    """The keys and values of a layer [rows, heads, length, size], in arrays that do not grow."""

    def __init__(self, layer: DynamicLayer, length: int, column: Int[Tensor, "1"]) -> None:
        super().__init__()
        self.column = column
        """Where the next token's key and value go; the decoder moves it."""
        self.keys, self.values = (_with_room(x, length) for x in (layer.keys, layer.values))
        self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write one token, and return the whole arrays: the attention mask hides what is not written yet."""
        _write(self.keys, 2, self.column, key_states.to(self.dtype))
        _write(self.values, 2, self.column, value_states.to(self.dtype))
        return self.keys, self.values


def _write(array: Tensor, dim: int, place: Int[Tensor, "1"], values: Tensor) -> None:
    """`index_copy_` at one place, which gives the same bytes with every kernel: the deterministic one of CUDA sorts the
    places first."""
    if array.is_cuda:
        with fast_kernels():
            array.index_copy_(dim, place, values)
    else:
        array.index_copy_(dim, place, values)


def _with_room(x: Float[Tensor, "rows heads width size"], length: int) -> Float[Tensor, "rows heads length size"]:
    room = x.new_zeros(*x.shape[:2], length, x.shape[3])
    room[:, :, : x.shape[2]] = x
    return room


def fix(cache: DynamicCache, length: int, column: Int[Tensor, "1"]) -> None:
    """Replace the layers of a cache by layers of fixed length. Raises ValueError for layers of another kind than those
    of full attention."""
    if others := {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}:
        raise ValueError(f"decoding with arrays of fixed size needs full attention, not {', '.join(sorted(others))}")
    for place, layer in enumerate(cache.layers):
        cache.layers[place] = FixedLayer(layer, length, column)


class StaticDecoder:
    """Responses to prompts that the model has read into `cache`, all rows side by side. An ended row is computed until
    a stop test finds at least half of the rows ended; what is drawn behind its stop token is cut off.

    Args:
        model: reads one token a row; `can_pack` must hold.
        cache: keys and values of the prompts; the decoder changes it.
        attention: 1 on the prompts' tokens, 0 on the padding to their left.
        positions: of the prompts' last tokens.
        uniforms: one number in [0, 1) for each token that may be drawn, float64.
        first: log-probabilities of the first tokens, in nats, at the temperature.
        temperature: of all others.
        stop_ids: tokens that end a response.
        draw: chooses the tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: DynamicCache,
        attention: Int[Tensor, "rows width"],
        positions: Int[Tensor, "rows 1"],
        uniforms: Float[Tensor, "rows count"],
        first: Float[Tensor, "rows vocabulary"],
        temperature: float,
        stop_ids: frozenset[int],
        draw: Draw,
    ) -> None:
        (rows, width), count = attention.shape, uniforms.shape[1]
        device, length = attention.device, width + count
        self.model, self.cache, self.temperature, self.draw = model, cache, temperature, draw
        self.first, self.count = first, count
        self.stop_ids = stop_ids
        self.stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
        self.column = torch.full((1,), width - 1, device=device)
        fix(cache, length, self.column)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.positions = positions.clone()
        self.mask: Bool[Tensor, "rows 1 1 length"] = torch.zeros(rows, 1, 1, length, dtype=torch.bool, device=device)
        self.mask[..., :width] = attention[:, None, None].bool()
        self.uniforms = uniforms.to(device)
        self.responses = torch.zeros(rows, count, dtype=torch.long, device=device)
        self.logprobs = first.new_zeros(rows, count)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.rows = list(range(rows))
        """The number of each row that is still computed."""
        self.done: dict[int, tuple[list[int], list[float], bool]] = {}

    def run(self) -> list[tuple[list[int], list[float], bool]]:
        """The token ids of each row, their log-probabilities (nats), and whether it ended."""
        self._record(self.first)
        recorder = Recorder(self.model)
        step = Replayed(self._step, recorder)
        for drawn in range(1, self.count):
            if drawn % STOP_TEST == 0 and (running := self._running()) is not None:
                if not running:
                    break
                self._keep(running)
                step = Replayed(self._step, recorder)
            step()
        self._finish(range(len(self.rows)))
        return [self.done[row] for row in sorted(self.done)]

    def _step(self) -> None:
        """Read the last token of each row and draw the next one; all in place, nothing read by the host."""
        self.column.add_(1)
        self.mask.index_fill_(3, self.column, True)
        output = self.model(
            input_ids=self.tokens,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._record(masked_log_softmax(output.logits[:, -1], temperature=self.temperature))

    def _record(self, logprobs: Float[Tensor, "rows vocabulary"]) -> None:
        chosen = self.draw(logprobs, self.uniforms.index_select(1, self.place)[:, 0])[:, None]
        _write(self.responses, 1, self.place, chosen)
        _write(self.logprobs, 1, self.place, logprobs.gather(1, chosen))
        self.ended.logical_or_((chosen == self.stops).any(dim=1))
        self.tokens.copy_(chosen)
        self.positions.add_(1)
        self.place.add_(1)

    def _running(self) -> list[int] | None:
        """The places of the rows that have not ended, where these are half of all rows or fewer: a new batch size
        costs a copy of the cache and a new graph."""
        running = (~self.ended).nonzero()[:, 0].tolist()
        return running if 2 * len(running) <= len(self.rows) else None

    def _keep(self, places: list[int]) -> None:
        """Continue with these rows only."""
        self._finish(sorted(set(range(len(self.rows))) - set(places)))
        index = torch.tensor(places, device=self.place.device)
        self.cache.batch_select_indices(index)
        for name in OF_ROWS:
            setattr(self, name, getattr(self, name)[index])
        self.rows = [self.rows[place] for place in places]

    def _finish(self, places: "range | list[int]") -> None:
        """Note the responses at these places, up to their first stop token."""
        index = torch.tensor(list(places), dtype=torch.long, device=self.place.device)
        drawn = int(self.place)
        tokens, logprobs = self.responses[index, :drawn].tolist(), self.logprobs[index, :drawn].tolist()
        for place, ids, values in zip(places, tokens, logprobs, strict=True):
            length = next((i + 1 for i, token in enumerate(ids) if token in self.stop_ids), drawn)
            self.done[self.rows[place]] = (ids[:length], values[:length], ids[length - 1] in self.stop_ids)


class Replayed:
    """A step without arguments or results. Where its recorder records, it is computed twice and then replayed as a CUDA
    graph; the kernels, and so the results, are the same. Not run on a GPU."""

    def __init__(self, step: Callable[[], None], recorder: "Recorder") -> None:
        self.step, self.recorder, self.steps, self.graph = step, recorder, 0, None

    def __call__(self) -> None:
        """One step."""
        if self.steps == WARM_UP:
            self.graph = self.recorder.record(self.step)
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()
        self.steps += 1


class Recorder:
    """Records steps of a model on CUDA as graphs, of which the last one only is replayed: all use the same memory. Not
    run on a GPU."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.device = model, model.device
        self.stream: Any = None
        self.last: Any = None
        """The last graph; while it lives, its memory can be used for the next one."""
        _decoded.setdefault(model, "static")

    def record(self, step: Callable[[], None]) -> Any:
        """The graph of a step, which is not computed. None where the model is not on CUDA, or divided (FSDP's hooks
        wait for streams that are not recorded), and, with a warning the first time, where the step cannot be
        recorded."""
        if self.device.type != "cuda" or self.model in _not_recorded or is_divided(self.model):
            return None
        before = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.device(self.device):
                self.last = self._graph(step)
        except RuntimeError as error:
            torch.cuda.set_stream(before)  # torch.cuda.graph leaves its own one, where the end of a recording fails
            _not_recorded.add(self.model)
            _decoded[self.model] = "static"
            warnings.warn(f"sampling without CUDA graphs: {error}".splitlines()[0], stacklevel=2)
            return None
        _decoded[self.model] = "graph"
        return self.last

    def _graph(self, step: Callable[[], None]) -> Any:
        self.stream = self.stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph, pool = torch.cuda.CUDAGraph(), None if self.last is None else self.last.pool()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            step()
        return graph
