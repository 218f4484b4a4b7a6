"""`shared_prompts.py`: a prompt that is read once gives what rows with a prompt each give, gradients included."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_core.models import batching, shared_prompts
from rlhf_core.models.batch import pad_batch, sequence_scores
from rlhf_core.models.sequence_logprobs import response_logprobs
from rlhf_core.models.shared_prompts import SharedPrompts, shared_prompt_logprobs, shared_prompt_scores

Build = Callable[..., PreTrainedModel]
PAD = 0
PROMPTS = [[3, 5, 4], [3, 9, 8, 7, 6, 4], [4]]
RESPONSES = [[[30, 10, 1], [11, 12, 13, 14, 15, 1], [PAD]], [[20, 1]], [[40, 41, 42, 43, 1], [7, 1], [9, 9, 9]]]
ROWS = [(prompt, response) for prompt, group in zip(PROMPTS, RESPONSES, strict=True) for response in group]


def gradient(model: PreTrainedModel, numbers: torch.Tensor) -> torch.Tensor:
    """Of a sum in which every row has a weight of its own."""
    model.zero_grad()
    (numbers * torch.arange(1, len(numbers) + 1)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("tokens", [4, 1024])
def test_scores_and_gradients_are_those_of_whole_rows(
    kind: str, tokens: int, build_scalar: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "TOKENS_ON_CPU", tokens)
    model = build_scalar(kind)
    scores = shared_prompt_scores(model, SharedPrompts.of(PROMPTS, RESPONSES, PAD))
    whole = sequence_scores(model, pad_batch([p for p, _ in ROWS], [r for _, r in ROWS], PAD))
    torch.testing.assert_close(scores, whole, rtol=0, atol=1e-5)
    expected = gradient(model, whole)
    assert (gradient(model, scores) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("tokens", [4, 1024])
def test_logprobs_and_gradients_are_those_of_whole_rows(
    kind: str, tokens: int, build_lm: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "TOKENS_ON_CPU", tokens)
    model = build_lm(kind)
    logprobs = shared_prompt_logprobs(model, SharedPrompts.of(PROMPTS, RESPONSES, PAD))
    whole = response_logprobs(model, pad_batch([p for p, _ in ROWS], [r for _, r in ROWS], PAD))
    torch.testing.assert_close(logprobs, whole, rtol=0, atol=1e-4)
    expected = gradient(model, whole)
    assert (gradient(model, logprobs) - expected).norm() <= 1e-5 * expected.norm()


def test_a_model_with_a_recurrent_state_reads_whole_rows(build_scalar: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache passes no gradient."""
    model = build_scalar()
    batch = SharedPrompts.of(PROMPTS, RESPONSES, PAD)
    expected = shared_prompt_scores(model, batch)
    monkeypatch.setattr(shared_prompts, "DynamicLayer", type(None))
    torch.testing.assert_close(shared_prompt_scores(model, batch), expected, rtol=0, atol=1e-5)


def test_an_empty_response_is_scored_at_the_end_of_its_prompt(build_scalar: Build) -> None:
    model = build_scalar()
    scores = shared_prompt_scores(model, SharedPrompts.of([[3, 5, 4]], [[[], [7, 1]]], PAD))
    alone = sequence_scores(model, pad_batch([[3, 5, 4], [3, 5, 4]], [[], [7, 1]], PAD))
    torch.testing.assert_close(scores, alone, rtol=0, atol=1e-5)
