"""`static_decoding.py`: the responses are those of the plain sampler, and the host reads values at stop tests only.
Tests of what all engines have in common: ppo/test_engines.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from rlhf_core.models import sharding, static_decoding
from rlhf_core.models.sampling import Sampled, sample
from rlhf_core.models.static_decoding import STOP_TEST, WARM_UP, Recorder, Replayed, StaticDecoder, decoding_of, suits

Build = Callable[..., PreTrainedModel]
PAD, END = 0, 1
PROMPTS = [[3, 7 + i, *range(20, 20 + 2 * (i % 5)), 4] for i in range(12)] * 3
STOPS = frozenset({END, 17, 30})


def run(model: PreTrainedModel, **changes: Any) -> Sampled:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "stop_ids": STOPS, "pad_id": PAD}
    options |= {"batch_size": 20, "static": True} | changes
    prompts = options.pop("prompts", PROMPTS)
    return sample(model, prompts, [(4, i) for i in range(len(prompts))], **options)


def assert_equal(ours: Sampled, plain: Sampled) -> None:
    """Tokens and ends equal; log-probabilities to 1e-5 nats, since attention adds over more columns."""
    assert ours.responses == plain.responses
    assert ours.ended == plain.ended
    for a, b in zip(ours.logprobs, plain.logprobs, strict=True):
        assert torch.tensor(a).sub(torch.tensor(b)).abs().max() <= 1e-5


def test_responses_are_those_of_the_plain_sampler(kind: str, build_lm: Build) -> None:
    """Over two stop tests, with rows of several widths that leave, repeated prompts, and rows at the limit."""
    model = build_lm(kind)
    ours = run(model)
    assert_equal(ours, run(model, static=False))
    lengths = sorted(len(response) for response in ours.responses)
    assert lengths[0] < STOP_TEST < 2 * STOP_TEST < lengths[-1]
    assert {True, False} == set(ours.ended)


@pytest.mark.parametrize("count", [1, 2, STOP_TEST, STOP_TEST + 1])
@pytest.mark.parametrize("stops", [STOPS, frozenset()], ids=["stops", "no stops"])
def test_the_length_limit_and_the_stop_test_may_fall_together(
    build_lm: Build, count: int, stops: frozenset[int]
) -> None:
    model = build_lm("qwen2")
    ours = run(model, max_new_tokens=count, stop_ids=stops)
    assert_equal(ours, run(model, static=False, max_new_tokens=count, stop_ids=stops))
    assert max(map(len, ours.responses)) == count


def widths_of(model: PreTrainedModel, **changes: Any) -> list[int]:
    """The number of rows of each pass."""
    forward, widths = model.forward, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        widths.append(len(kwargs["input_ids"]))
        return forward(*args, **kwargs)

    model.forward = counted
    run(model, batch_size=len(PROMPTS), **changes)
    model.forward = forward
    return widths


def test_rows_leave_at_a_stop_test_only_and_half_of_them_at_least(build_lm: Build) -> None:
    widths = widths_of(build_lm(), stop_ids=frozenset(range(1, 60, 15)), max_new_tokens=80)
    groups = [(rows, len(list(passes))) for rows, passes in groupby(widths[1:])]
    assert groups[0] == (len(PROMPTS), 2 * STOP_TEST - 1)  # at the first stop test most rows still run
    assert len(groups) > 1
    assert all(2 * after <= before for (before, _), (after, _) in pairwise(groups))
    assert all(passes % STOP_TEST == 0 for _, passes in groups[1:-1])


def test_decoding_ends_at_the_stop_test_after_the_last_row(build_lm: Build) -> None:
    everything = frozenset(range(60))
    assert len(widths_of(build_lm(), stop_ids=everything, max_new_tokens=80)) == STOP_TEST


class NothingRead(TorchDispatchMode):
    """Raises where a value of a tensor would reach the host, or a shape depends on one."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.READS:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_and_changes_tensors_in_place(
    build_lm: Build, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a CUDA graph requires: the same memory in each step, no value at the host."""
    decoders = []

    def stopped(decoder: StaticDecoder) -> list[Any]:
        decoders.append(decoder)
        return [([2], [0.0], False)] * len(decoder.rows)

    monkeypatch.setattr(StaticDecoder, "run", stopped)
    run(build_lm(kind), batch_size=len(PROMPTS))
    decoder = decoders[0]
    with torch.no_grad():
        decoder._record(decoder.first)
        decoder._step()
        before = places_of(decoder)
        for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__index__", "cpu"):
            monkeypatch.setattr(torch.Tensor, name, refused)
        with NothingRead():
            decoder._step()
        monkeypatch.undo()
    assert places_of(decoder) == before
    assert int(decoder.place) == 3


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("a value reaches the host")


def places_of(decoder: StaticDecoder) -> list[int]:
    tensors = [value for value in vars(decoder).values() if isinstance(value, torch.Tensor)]
    tensors += [x for layer in decoder.cache.layers for x in (layer.keys, layer.values)]
    return [tensor.data_ptr() for tensor in tensors]


def test_sliding_windows_are_refused_and_the_default_on_a_cpu_is_the_plain_sampler(build_lm: Build) -> None:
    config = MistralConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, bos_token_id=None, eos_token_id=END, pad_token_id=PAD,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="cannot decode with arrays of fixed size"):
        run(model)
    assert not suits(model)
    assert not suits(build_lm())
    assert run(build_lm(), static=None) == run(build_lm(), static=False)


class FakeGraph:
    """Counts its replays."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

    def pool(self) -> "FakeGraph":
        return self


class FakeCUDA:
    """The parts of torch.cuda that record a graph. `broken`: a recording fails at its end, as torch's does: the stream
    of the recording stays the current one."""

    CUDAGraph = FakeGraph

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.current = broken, "main"
        self.devices: list[Any] = []
        self.pools: list[Any] = []

    def Stream(self) -> str:
        return "recording"

    def synchronize(self) -> None: ...

    def current_stream(self, device: torch.device) -> str:
        return self.current

    def set_stream(self, stream: str) -> None:
        self.current = stream

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield

    @contextmanager
    def graph(self, graph: FakeGraph, pool: Any, stream: str, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads go on with their work"
        self.pools.append(pool)
        self.current = stream
        yield
        if self.broken:
            raise RuntimeError("operation not permitted\nmore")
        self.current = "main"


class ModelOn:
    """A model as far as a recorder reads it."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def replayed_on(monkeypatch: pytest.MonkeyPatch, model: Any, cuda: FakeCUDA, segments: int = 2) -> list[Replayed]:
    """Steps with one recorder, each called twice more than it is computed without a graph."""
    monkeypatch.setattr(static_decoding.torch, "cuda", cuda)
    recorder = Recorder(model)
    steps = [Replayed(lambda: None, recorder) for _ in range(segments)]
    for step in steps:
        for _ in range(WARM_UP + 2):
            step()
    monkeypatch.undo()
    return steps


def test_graphs_are_recorded_on_the_models_gpu_and_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cuda = ModelOn("cuda:1"), FakeCUDA()
    first, second = replayed_on(monkeypatch, model, cuda)
    assert cuda.devices == [model.device, model.device]
    assert cuda.pools == [None, first.graph]
    assert first.graph.replays == second.graph.replays == 2
    assert decoding_of(model) == "graph"


def test_a_model_on_the_cpu_is_not_recorded_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cuda = ModelOn("cpu"), FakeCUDA()
    assert all(step.graph is None for step in replayed_on(monkeypatch, model, cuda))
    assert cuda.devices == []
    assert decoding_of(model) == "static"


def test_a_divided_model_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP's hooks wait for streams outside the recording."""
    model, cuda = ModelOn("cuda"), FakeCUDA()
    model.__dict__[sharding.ROOT] = None
    assert all(step.graph is None for step in replayed_on(monkeypatch, model, cuda))
    assert decoding_of(model) == "static"


def test_a_failed_recording_is_undone_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cuda = ModelOn("cuda"), FakeCUDA(broken=True)
    with pytest.warns(UserWarning, match="^sampling without CUDA graphs: operation not permitted$"):
        replayed_on(monkeypatch, model, cuda)
    replayed_on(monkeypatch, model, cuda)
    assert len(cuda.devices) == 1
    assert cuda.current == "main"
    assert decoding_of(model) == "static"


def test_the_default_on_a_cpu_is_plain_decoding(build_lm: Build) -> None:
    model = build_lm()
    run(model, static=None)
    assert decoding_of(model) == "plain"
    run(model)
    assert decoding_of(model) == "static"
