"""`scorers.py`: the reward model reads the ids that were sampled, in any order and batch."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from rlhf_core.models.batch import pad_batch, sequence_scores
from rlhf_core.models.scorers import Answers, RewardModelScorer, Scorer

Build = Callable[..., PreTrainedModel]
PAD = 0
PROMPTS = [[3, 9, 4], [3, 8, 7, 6, 4], [3, 4], [3, 5, 6, 4]]
RESPONSES = [[20, 21, 22, 23, 1], [30, PAD], [40, 41, 42], [50]]


def answers(texts: str = "text") -> Answers:
    return Answers([[] for _ in PROMPTS], [texts] * len(PROMPTS), PROMPTS, RESPONSES)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 10])
def test_scores_come_back_in_order_whatever_the_batch(kind: str, build_scalar: Build, batch_size: int) -> None:
    model = build_scalar(kind)
    scorer: Scorer = RewardModelScorer(model, PAD, batch_size)
    alone = [sequence_scores(model, pad_batch([p], [r], PAD)).item() for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert scorer(answers()).total == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 3) for score in alone}) == len(alone)


def test_rule_02_nothing_is_tokenised_again(build_scalar: Build) -> None:
    scorer = RewardModelScorer(build_scalar(), PAD, 2)
    assert scorer(answers("one")) == scorer(answers("another"))


def test_scoring_keeps_no_gradient(build_scalar: Build) -> None:
    model = build_scalar()
    RewardModelScorer(model, PAD, 2)(answers())
    assert all(parameter.grad is None for parameter in model.parameters())
