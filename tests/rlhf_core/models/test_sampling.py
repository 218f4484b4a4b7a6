"""The sampler: samples depend on weights and key only. Tests of what all engines have in common:
ppo/test_engines.py."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, PretrainedConfig, PreTrainedModel

from rlhf_core.errors import UserError
from rlhf_core.models.sampling import Sampled, draw, require_cache, sample, stream_response

Build = Callable[..., PreTrainedModel]
PAD, END = 0, 1
PROMPTS = [[3, 7 + i, *range(20, 20 + 2 * (i % 5)), 4] for i in range(12)]


def run(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    keys: Sequence[tuple[int, ...]] | None = None,
    **changes: Any,
) -> Sampled:
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "temperature": 1.0,
        "stop_ids": frozenset({END}),
        "pad_id": PAD,
        "batch_size": 5,
    }
    return sample(model, prompts, keys or [(1, 0, i) for i in range(len(prompts))], **(options | changes))


def test_rule_01_draw_hits_every_token_as_often_as_its_probability() -> None:
    """An even grid of u maps to p·n points of each token, give or take the two at its ends."""
    torch.manual_seed(0)
    logprobs = (3 * torch.randn(9)).log_softmax(-1)
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    found = draw(logprobs.expand(count, -1), uniforms).bincount(minlength=9)
    assert (found - logprobs.double().exp() * count).abs().max() <= 1.01


def test_rule_01_draw_never_takes_a_token_of_probability_0() -> None:
    logprobs = torch.tensor([[float("-inf"), 0.5, float("-inf"), 0.5, float("-inf")]]).log_softmax(-1)
    edges = torch.tensor([0.0, 0.5 - 1e-12, 0.5, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert draw(logprobs.expand(4, -1), edges).tolist() == [1, 1, 3, 3]


def test_rule_01_draw_reads_rare_tokens_in_float64() -> None:
    """A token of probability 1e-9 has its place in the distribution; a float32 sum would swallow it."""
    logprobs = torch.tensor([[1 - 1e-9, 1e-9]], dtype=torch.float64).log()
    assert draw(logprobs, torch.tensor([1 - 5e-10], dtype=torch.float64)).tolist() == [1]
    assert draw(logprobs, torch.tensor([1 - 2e-9], dtype=torch.float64)).tolist() == [0]


def test_rule_03_samples_depend_on_neither_batch_nor_order_nor_padding(kind: str, build_lm: Build) -> None:
    model = build_lm(kind)
    whole = run(model, batch_size=len(PROMPTS)).responses
    assert run(model, batch_size=1).responses == whole
    assert run(model, batch_size=5).responses == whole
    keys = [(1, 0, i) for i in range(len(PROMPTS))]
    assert run(model, PROMPTS[::-1], keys[::-1]).responses == whole[::-1]
    long = [3, *[30] * 30, 4]
    assert run(model, [long, *PROMPTS], [(8, 8), *keys], batch_size=64).responses[1:] == whole


def test_rule_03_prompts_that_repeat_are_read_once_and_answered_as_if_alone(kind: str, build_lm: Build) -> None:
    """Three samples a prompt, mixed with others in one batch."""
    model, prompts = build_lm(kind), [PROMPTS[i % 5] for i in range(15)]
    keys = [(7, i) for i in range(15)]
    alone = run(model, prompts, keys, batch_size=1)
    forward, widths = model.forward, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        widths.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    model.forward = counted
    together = run(model, prompts, keys, batch_size=15)
    assert widths[:2] == [(5, 11), (15, 1)]
    assert together.responses == alone.responses
    for ours, theirs in zip(together.logprobs, alone.logprobs, strict=True):
        assert np.abs(np.array(ours) - np.array(theirs)).max() <= 2e-5


def test_rule_03_other_keys_give_other_samples(build_lm: Build) -> None:
    model = build_lm()
    base = run(model).responses
    for change in ((2, 0), (1, 1)):
        other = run(model, keys=[(*change, i) for i in range(len(PROMPTS))]).responses
        assert sum(a != b for a, b in zip(base, other, strict=True)) >= len(PROMPTS) - 2
    twice = run(model, [PROMPTS[0]] * 6, [(1, 0, i) for i in range(6)]).responses
    assert len({tuple(response) for response in twice}) >= 5


def test_rule_00_the_pad_token_may_be_sampled(build_lm: Build) -> None:
    """It ends nothing and is kept."""
    model = build_lm()
    with torch.no_grad():
        model.get_output_embeddings().weight[PAD] *= 2
    sampled = run(model, PROMPTS * 4, [(4, i) for i in range(4 * len(PROMPTS))])
    inside = [response for response in sampled.responses if PAD in response[:-1]]
    assert inside
    assert all(len(r) == len(p) for r, p in zip(sampled.responses, sampled.logprobs, strict=True))


def test_rule_04_a_response_at_the_length_limit_has_not_ended(build_lm: Build) -> None:
    model = build_lm()
    full = run(model, stop_ids=frozenset())
    assert [len(response) for response in full.responses] == [12] * len(PROMPTS)
    assert not any(full.ended)
    first = full.responses[0]
    closes = next(token for token in first[1:] if token != first[0])
    length = first.index(closes) + 1
    for limit, ended in ((length, True), (length - 1, False)):
        cut = run(model, PROMPTS[:1], stop_ids=frozenset({closes}), max_new_tokens=limit)
        assert cut.responses == [first[:limit]]
        assert cut.ended == [ended]


def test_a_stream_is_what_sample_samples(kind: str, build_lm: Build) -> None:
    """Token by token, the stop token included, for the same key; another key gives another response."""
    model, stops = build_lm(kind), frozenset(range(12))
    whole = run(model, temperature=0.8, stop_ids=stops)
    assert {True, False} == set(whole.ended)
    streams = [
        list(stream_response(model, prompt, key, max_new_tokens=12, temperature=0.8, stop_ids=stops))
        for i, prompt in enumerate(PROMPTS)
        for key in [(1, 0, i)]
    ]
    assert streams == whole.responses
    other = stream_response(model, PROMPTS[0], (2, 0, 0), max_new_tokens=12, temperature=0.8, stop_ids=frozenset())
    assert list(other) != whole.responses[0]


def test_a_stream_computes_only_the_tokens_that_are_read(build_lm: Build) -> None:
    """One pass for each token that was taken, and gradients stay as the caller has them."""
    model, passes = build_lm(), []
    model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    tokens = stream_response(model, PROMPTS[0], (1, 0), max_new_tokens=12, temperature=1.0, stop_ids=frozenset())
    assert passes == []
    next(tokens)
    next(tokens)
    assert passes == [False, False]
    assert torch.is_grad_enabled()


def test_a_model_whose_state_cannot_drop_rows_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(UserError, match="MambaForCausalLM: has layers without attention"):
        require_cache(model)


def test_a_configuration_that_does_not_describe_its_layers_is_refused_in_one_line(build_lm: Build) -> None:
    model = build_lm()
    model.config = PretrainedConfig()
    with pytest.raises(UserError, match=r"the sampler cannot make a cache from its configuration .*num_hidden_layers"):
        require_cache(model)
