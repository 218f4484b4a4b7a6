"""`batch.py`: masks come from lengths, and padding changes no number, for absolute and rotary positions alike."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_core.models import batching
from rlhf_core.models.batch import (
    in_passes,
    pad_batch,
    predict,
    response_logits,
    sequence_scores,
    state_values,
)
from rlhf_core.models.token_logprobs import logprobs_and_entropy

Build = Callable[..., PreTrainedModel]
PAD = 0
PROMPTS = [[3, 9, 4], [3, 8, 7, 6, 5, 11, 12, 13, 4], [5]]
RESPONSES = [[20, 21, 22, 1], [30], [40, 41, 42, 43, 44, 45]]


def whole(prompt: list[int], response: list[int]) -> tuple[torch.Tensor, slice]:
    """A sequence without any padding, and where its response tokens are predicted."""
    return torch.tensor([prompt + response]), slice(len(prompt) - 1, len(prompt) + len(response) - 1)


def test_rule_00_masks_come_from_lengths_and_a_sampled_pad_token_counts() -> None:
    batch = pad_batch([[3, PAD, 4], [3]], [[PAD, 7, PAD], [7, 1]], PAD)
    assert batch.mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]]
    assert batch.actions.tolist() == [[PAD, 7, PAD], [7, 1, PAD]]


def test_rule_06_positions_count_real_tokens() -> None:
    batch = pad_batch([[3, 4], [3]], [[7], [7]], PAD)
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 0, 1]]


def test_an_empty_response_keeps_its_row() -> None:
    batch = pad_batch([[3, 4]], [[]], PAD)
    assert batch.time == 1
    assert batch.mask.tolist() == [[0]]


def test_response_logits_predict_each_response_token(kind: str, build_lm: Build) -> None:
    model = build_lm(kind)
    batch = pad_batch(PROMPTS, RESPONSES, PAD)
    logits = batch.spread(response_logits(model, batch))
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids, predicted = whole(prompt, response)
        torch.testing.assert_close(logits[row, : len(response)], model(ids).logits[0, predicted], rtol=0, atol=1e-4)


def test_rule_06_failure_08_padding_changes_no_logprob(kind: str, build_lm: Build) -> None:
    """The same prompt alone and in a batch."""
    model = build_lm(kind)
    batch = pad_batch(PROMPTS, RESPONSES, PAD)
    together = batch.spread(response_logits(model, batch).log_softmax(-1))
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        alone = response_logits(model, pad_batch([prompt], [response], PAD)).log_softmax(-1)
        picked = torch.tensor(response)[:, None]
        difference = together[row, : len(response)].gather(1, picked) - alone.gather(1, picked)
        assert difference.abs().max() <= 1e-5


def test_rule_06_padding_changes_no_value(kind: str, build_scalar: Build) -> None:
    model = build_scalar(kind)
    batch = pad_batch(PROMPTS, RESPONSES, PAD)
    values, scores = state_values(model, batch), sequence_scores(model, batch)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        alone = pad_batch([prompt], [response], PAD)
        assert (values[row, : len(response)] - state_values(model, alone)[0]).abs().max() <= 1e-5
        assert (scores[row] - sequence_scores(model, alone)[0]).abs() <= 1e-5


def test_rule_06_token_ids_on_padding_change_nothing(kind: str, build_lm: Build, build_scalar: Build) -> None:
    batch, other = pad_batch(PROMPTS, RESPONSES, PAD), pad_batch(PROMPTS, RESPONSES, 17)
    real = batch.mask.bool()
    lm, scalar = build_lm(kind), build_scalar(kind)
    torch.testing.assert_close(response_logits(lm, batch), response_logits(lm, other), rtol=0, atol=1e-5)
    torch.testing.assert_close(state_values(scalar, batch)[real], state_values(scalar, other)[real], rtol=0, atol=1e-5)


def test_rule_09_a_value_is_that_of_the_position_before_the_action(kind: str, build_scalar: Build) -> None:
    """V(s_t) sees the prompt and the actions before t, and not action t."""
    model = build_scalar(kind)
    values = state_values(model, pad_batch(PROMPTS, RESPONSES, PAD))
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        for t in range(len(response)):
            prefix = sequence_scores(model, pad_batch([prompt + response[:t]], [[]], PAD))
            assert values[row, t].item() == pytest.approx(prefix.item(), abs=1e-5)


def test_failure_03_a_score_is_read_at_the_last_real_token(kind: str, build_scalar: Build) -> None:
    """At the last token of a response that ends in a sampled pad token; at the last prompt token without one."""
    model = build_scalar(kind)
    responses = [[20, PAD], [], [30, 31, 32]]
    scores = sequence_scores(model, pad_batch(PROMPTS, responses, PAD))
    for row, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True)):
        states = getattr(model, model.base_model_prefix)(torch.tensor([prompt + response])).last_hidden_state
        assert scores[row].item() == pytest.approx(model.score(states[0, -1]).item(), abs=1e-5)


def test_scores_are_those_of_the_hugging_face_head(kind: str, build_scalar: Build) -> None:
    """The output of `AutoModelForSequenceClassification` for an unpadded sequence."""
    model = build_scalar(kind)
    scores = sequence_scores(model, pad_batch(PROMPTS, RESPONSES, PAD))
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        theirs = model(input_ids=torch.tensor([prompt + response])).logits[0, 0]
        assert scores[row].item() == pytest.approx(theirs.item(), abs=1e-5)


def test_rule_05_half_precision_models_give_float32(build_lm: Build, build_scalar: Build) -> None:
    """Logits, log-probabilities and values."""
    batch = pad_batch(PROMPTS, RESPONSES, PAD)
    predictions = predict(build_lm().bfloat16(), batch)
    assert predictions.hidden.dtype == torch.bfloat16
    assert predictions.logits().dtype == torch.float32
    assert logprobs_and_entropy(predictions, batch.response_tokens)[0].dtype == torch.float32
    assert state_values(build_scalar().bfloat16(), batch).dtype == torch.float32


@pytest.mark.parametrize("tokens", [4, 2048])
def test_passes_of_some_rows_give_the_numbers_and_the_gradient_of_the_whole_batch(
    tokens: int, kind: str, build_scalar: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the rows; equal prompts and an empty response among them."""
    monkeypatch.setattr(batching, "TOKENS_ON_CPU", tokens)
    model = build_scalar(kind)
    batch = pad_batch([*PROMPTS, PROMPTS[0]], [*RESPONSES, []], PAD)
    whole, parts = sequence_scores(model, batch), in_passes(partial(sequence_scores, model), batch)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5)
    slopes = [torch.autograd.grad(found.square().sum(), list(model.parameters())) for found in (whole, parts)]
    for one, other in zip(*slopes, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()
