"""What goes wrong in other libraries for PPO (docs/rules.md), on whole phases, each row by its number.

`pytest -k failure_03` runs every test of a row; some are in the tests of a module, those of stages and data in
tests/tasks and tests/test_pipeline.py. tests/test_numbered.py checks that every row has one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from rlhf_core.data.chat import Conversation
from rlhf_core.data.scorer import Answers, Scored
from rlhf_core.ppo.trainer import PPOTrainer
from tests.rlhf_core.ppo.stepping import credit_of

MakeTrainer = Callable[..., PPOTrainer]
PAD = 0


@dataclass(frozen=True)
class Watcher:
    """A hidden judge: `sign` times the letters of an answer."""

    sign: float
    name: str = "letters"

    def __call__(self, answers: Answers) -> Scored:
        return Scored([self.sign * len(text) for text in answers.texts])


def weights(trainer: PPOTrainer) -> torch.Tensor:
    models = (trainer.models.policy, trainer.models.critic)
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def by_row(answers: Answers) -> list[float]:
    return [float(1 + row) for row in range(len(answers.texts))]


def test_failure_03_score_lands_on_the_last_real_token(
    make_trainer: MakeTrainer, says_pad: Callable[[PPOTrainer], PPOTrainer]
) -> None:
    """Without KL penalty nothing else is rewarded: not padding, and not the token before a sampled pad token."""
    kl = {"coef": 0.0}
    trainer = says_pad(make_trainer(batch_size=64, scorer=by_row, kl=kl, score={"clip": 1e9}))
    rollout = trainer.rollout()
    assert any(ids[-1] == PAD for ids in rollout.response_ids)
    assert len(set(rollout.lengths)) > 2
    scores = trainer.score(rollout)
    rewards = credit_of(trainer, rollout).rewards
    expected = torch.zeros_like(rewards)
    for row, length in enumerate(rollout.lengths):
        expected[row, length - 1] = scores.used[row]
    assert torch.equal(rewards, expected)


def test_failure_06_k1_and_k3_are_both_logged_and_agree_for_samples_of_the_policy(
    make_trainer: MakeTrainer,
) -> None:
    """Over 256 responses a step, far from the reference; a negative mean is what other samplers report."""
    trainer = make_trainer(batch_size=256, minibatches=1, micro_batch_size=128, ppo_epochs=1)
    for _ in range(2):
        row = trainer.step()
        assert row["kl"] > 1.0
        assert row["kl"] == pytest.approx(row["kl_full"], rel=0.1)
        assert row["kl_k3"] == pytest.approx(row["kl_full"], rel=0.5)


def test_failure_12_the_gold_score_is_logged_and_never_trained_on(
    make_trainer: MakeTrainer, prompts: Sequence[Conversation]
) -> None:
    """At every step and beside every answer to read; the opposite judge leaves every weight as it was."""
    one, other = (make_trainer(judge=Watcher(sign)) for sign in (1.0, -1.0))
    for _ in range(2):
        texts = one.rollout().texts
        row, opposite = one.step(), other.step()
        assert row["gold"] == pytest.approx(sum(map(len, texts)) / len(texts))
        assert opposite["gold"] == -(row["gold"] or 0.0)
        assert row["reward_raw"] == opposite["reward_raw"]
        assert math.isfinite(row["reward_raw"] or math.nan)
    assert torch.equal(weights(one), weights(other))
    for answer in one.answer(prompts[:3]):
        assert answer["gold"] == len(answer["response"])
        assert 0 <= answer["reward"] <= 1
