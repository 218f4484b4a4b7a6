"""KL of whole answers."""

import math
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_core.evaluation.divergence import Divergence, measure_divergence
from rlhf_core.models.sampling import sample

PROMPTS = [[5, 6], [7, 8, 9, 10], [11], [12, 13, 14]]


def answers(model: PreTrainedModel, temperature: float = 1.0) -> list[list[int]]:
    keys = [(7, i) for i in range(len(PROMPTS))]
    return sample(
        model, PROMPTS, keys, max_new_tokens=9, temperature=temperature, stop_ids=frozenset({1}), pad_id=0, batch_size=4
    ).responses


def measured(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    responses: list[list[int]],
    batch_size: int = 4,
    temperature: float = 1,
) -> Divergence:
    return measure_divergence(
        model, reference, PROMPTS, responses, pad_id=0, temperature=temperature, batch_size=batch_size
    )


@torch.no_grad()
def by_hand(
    model: PreTrainedModel, reference: PreTrainedModel, place: int, responses: list[int], temperature: float
) -> list[float]:
    """Exact KL and log ratio of one answer, alone and without padding."""
    ids = torch.tensor([PROMPTS[place] + responses])
    start = len(PROMPTS[place]) - 1
    ours, theirs = ((m(ids).logits[0, start:-1] / temperature).log_softmax(-1) for m in (model, reference))
    picked = torch.tensor(responses)[:, None]
    gap = (ours.gather(1, picked) - theirs.gather(1, picked))[:, 0]
    return [(ours.exp() * (ours - theirs)).sum().item(), gap.sum().item()]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_is_what_each_answer_alone_gives(build_lm: Callable[..., PreTrainedModel], temperature: float) -> None:
    model, reference = build_lm(seed=1), build_lm(seed=2)
    responses = answers(model, temperature)
    found = measured(model, reference, responses, temperature=temperature)
    for place, response in enumerate(responses):
        expected = by_hand(model, reference, place, response, temperature)
        each = [found.kl[place], found.log_ratio[place]]
        assert each == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_the_batch_changes_nothing_and_a_model_has_no_kl_to_itself(build_lm: Callable[..., PreTrainedModel]) -> None:
    model = build_lm(seed=1)
    responses = answers(model)
    one, all_ = measured(model, build_lm(seed=2), responses, 1), measured(model, build_lm(seed=2), responses, 4)
    for name in ("kl", "log_ratio"):
        assert getattr(one, name) == pytest.approx(getattr(all_, name), rel=1e-4, abs=1e-4)
    assert measured(model, model, responses).log_ratio == [0.0] * len(responses)
    assert measured(model, model, responses).kl == [0.0] * len(responses)
    assert min(measured(model, build_lm(seed=2), responses).kl) > 0


def test_the_mean_over_answers_estimates_the_kl(build_lm: Callable[..., PreTrainedModel]) -> None:
    """One token an answer: there the KL can be added up over the vocabulary."""
    model, reference = build_lm(seed=1), build_lm(seed=2)
    prompts = [[5, 6]] * 4000
    responses = sample(
        model,
        prompts,
        [(1, i) for i in range(len(prompts))],
        max_new_tokens=1,
        temperature=1.0,
        stop_ids=frozenset({1}),
        pad_id=0,
        batch_size=4000,
    ).responses
    found = measure_divergence(model, reference, prompts, responses, pad_id=0, temperature=1.0, batch_size=1000)
    with torch.no_grad():
        ours, theirs = (m(torch.tensor([[5, 6]])).logits[0, -1].log_softmax(-1) for m in (model, reference))
    exact = (ours.exp() * (ours - theirs)).sum().item()
    spread = torch.tensor(found.log_ratio).std().item() / math.sqrt(len(prompts))
    assert abs(sum(found.log_ratio) / len(found.log_ratio) - exact) < 4 * spread
    assert found.kl == pytest.approx([exact] * len(prompts), rel=1e-4)


def test_no_answers() -> None:
    no_model: PreTrainedModel = torch.nn.Identity()
    assert measure_divergence(no_model, no_model, [], [], pad_id=0, temperature=1.0, batch_size=4) == Divergence()
