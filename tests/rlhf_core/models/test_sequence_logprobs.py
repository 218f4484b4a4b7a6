"""`logprobs.py`: log π of whole responses, whatever they are batched with."""

import math
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_core.models.batch import pad_batch
from rlhf_core.models.sequence_logprobs import response_logprobs, sequence_logprobs

Build = Callable[..., PreTrainedModel]
PAD = 0
PROMPTS = [[3, 5, 4], [3, 4], [3, 6, 7, 8, 4], [3, 9, 4]]
RESPONSES = [[30, 31, 1], [0, 12, 0, 13, 1], [14], []]
"""The pad token is sampled in the second; the last is empty."""


@torch.no_grad()
def slow(model: PreTrainedModel, prompt: list[int], response: list[int]) -> float:
    """One token after the other, each from a pass of its own."""
    total = 0.0
    for place, token in enumerate(response):
        logits = model(torch.tensor([prompt + response[:place]])).logits[0, -1].double()
        total += logits.log_softmax(dim=0)[token].item()
    return total


@pytest.mark.parametrize("batch_size", [1, 3, 9])
def test_the_sum_over_tokens_of_a_slow_loop(kind: str, build_lm: Build, batch_size: int) -> None:
    model = build_lm(kind)
    found = sequence_logprobs(model, PROMPTS, RESPONSES, PAD, batch_size)
    expected = [slow(model, prompt, response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    assert found == pytest.approx(expected, abs=1e-4)
    assert found[3] == 0.0
    assert all(value < 0 for value in found[:3])


def test_the_responses_to_a_prompt_share_at_most_all_probability(build_lm: Build) -> None:
    model = build_lm()
    found = sequence_logprobs(model, [[3, 5, 4]] * 60, [[token] for token in range(60)], PAD, 16)
    assert math.fsum(map(math.exp, found)) == pytest.approx(1.0, abs=1e-5)


def test_only_the_response_gets_a_gradient(build_lm: Build) -> None:
    """The derivative of log π by the weights is that of the response's tokens, as autograd sees it in plain logits."""
    model = build_lm()
    batch = pad_batch(PROMPTS, RESPONSES, PAD)
    response_logprobs(model, batch).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    total = torch.zeros(())
    for prompt, response in zip(PROMPTS[:3], RESPONSES[:3], strict=True):
        logprobs = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        total = total + logprobs.gather(1, torch.tensor(response)[:, None]).sum()
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4)
